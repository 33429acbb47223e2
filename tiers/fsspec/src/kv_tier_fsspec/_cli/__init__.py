"""``kv-core object``: looks at the blocks below a URL, and checks them, while engines run."""

from kv_tier_fsspec._cli._commands import add_commands

__all__ = ["add_commands"]
