"""What runs inside the vLLM environment: the engine that the end-to-end tests drive.

Not a test module. The tests start it as ``python -m engine_process`` with vLLM's interpreter and
talk to it over a pair of pipes; see :mod:`engine_process._server`.
"""
