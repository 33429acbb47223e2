"""The description of a namespace: what its folder says of the blocks in it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from kv_core.contract import Namespace
from kv_core.errors import NamespaceError, TierOpenError
from kv_tier_fs._folders import FILE_MODE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Description"]

_FORMAT: Final = "kv-tier-fs"


@final
@dataclass(frozen=True, slots=True)
class Description:
    """What a layout writes about a namespace, and checks at every opening.

    Attributes:
        path: The file.
        layout: Name of the layout.
        version: Version of its format.
    """

    path: Path
    layout: str
    version: int

    def check(self, namespace: Namespace) -> bool:
        """Check the description that is there.

        Returns:
            ``False`` when there is none.

        Raises:
            TierOpenError: It describes another namespace, layout or version, or is damaged.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        except UnicodeDecodeError as error:
            raise self._unreadable() from error
        try:
            found: dict[str, Any] = json.loads(text)
            version, name = found["format_version"], found["layout"]
            stored = Namespace.from_description(found["namespace"])
        except (ValueError, KeyError, TypeError, NamespaceError) as error:
            raise self._unreadable() from error
        if (version, name) != (self.version, self.layout):
            raise TierOpenError(
                f"{self.path} describes layout {name!r}, version {version!r}; this tier writes "
                f"layout {self.layout!r}, version {self.version}. Use another root_dir, or remove "
                "the folder"
            )
        # Names for people may differ; everything that decides about bytes may not.
        if stored.fingerprint != namespace.fingerprint:
            ours, theirs = namespace.describe(), stored.describe()
            fields = ", ".join(field for field in ours if ours[field] != theirs[field])
            raise TierOpenError(
                f"{self.path} describes another namespace under the same name; these fields "
                f"differ: {fields}. Use another root_dir, or remove the folder"
            )
        return True

    def publish(self, namespace: Namespace, temporary: Path) -> None:
        """Write the description, so that others see all of it or nothing.

        Args:
            namespace: What to describe.
            temporary: A path in the same file system that nobody else uses.
        """
        description = {
            "format": _FORMAT,
            "format_version": self.version,
            "layout": self.layout,
            "fingerprint": namespace.fingerprint,
            "namespace": namespace.describe(),
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, FILE_MODE), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            json.dump(description, file, indent=2)
            file.write("\n")
            file.flush()
            # Blocks may be lost with the power; an empty description would refuse all later opens.
            os.fsync(file.fileno())
        # Of several who publish at once, the last wins; they all say the same.
        temporary.rename(self.path)

    def _unreadable(self) -> TierOpenError:
        return TierOpenError(
            f"{self.path} is not a description written by this tier. Remove the folder "
            f"{self.path.parent} and the folders of its blocks next to it, or use another root_dir"
        )
