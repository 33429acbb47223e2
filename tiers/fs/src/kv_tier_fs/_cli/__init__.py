"""``kv-core fs``: looks into a root folder, checks it and collects in it, while engines run."""

from kv_tier_fs._cli._commands import add_commands

__all__ = ["add_commands"]
