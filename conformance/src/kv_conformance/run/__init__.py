"""One run of the suite: cases, journal, supervisor, verdict and report."""
