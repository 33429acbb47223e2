"""Where things are below the root folder. Pure: nothing here touches the file system."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, final

from kv_core.contract import get_offload_block_hash, get_offload_group_idx

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.contract import Namespace, OffloadKey

__all__ = ["FileLayout"]

_MOST_HASH_CHARS: Final = 200


@final
class FileLayout:
    """Paths of one namespace, layout ``files``.

    Attributes:
        namespace_dir: Folder of what all ranks share: ``config.json`` and the writers.
        blocks_dir: Folder of the blocks.
        config_path: The description of the namespace.
        writers_dir: Locks and temporary files of those who write.
    """

    def __init__(self, root_dir: Path, namespace: Namespace) -> None:
        name = namespace.folder_name
        self.namespace_dir = root_dir / name
        self.blocks_dir = root_dir / f"{name}_r{namespace.stored_rank}"
        self.config_path = self.namespace_dir / "config.json"
        self.writers_dir = self.namespace_dir / "writers"
        self._blocks_prefix = str(self.blocks_dir)

    def block_path(self, key: OffloadKey) -> str:
        """Return the path of a block: ``<hex 1-3>/<hex 4-5>_g<group>/<hash>.bin``."""
        name = get_offload_block_hash(key).hex()
        if len(name) > _MOST_HASH_CHARS:
            # File names end at 255 bytes. No hex name begins with an x, so nothing aliases.
            name = "x" + hashlib.sha256(key).hexdigest()
        # Hashes shorter than the folder names need: an underscore is no hex digit either.
        padded = name.ljust(5, "_")
        group = get_offload_group_idx(key)
        return f"{self._blocks_prefix}/{padded[:3]}/{padded[3:5]}_g{group}/{name}.bin"
