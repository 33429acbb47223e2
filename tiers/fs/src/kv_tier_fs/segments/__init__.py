"""Layout ``segments``: whole jobs appended to large files, found through an index in memory."""

__all__: list[str] = []
