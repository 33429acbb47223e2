"""Layout ``files``: one checksummed file a block, for file systems that like nothing better."""

__all__: list[str] = []
