"""The harness for a folder that an SSH server serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final
from urllib.parse import urlsplit

from typing_extensions import override

from kv_conformance.harness import Fault
from kv_tier_fsspec._harness._folders import FileHarness
from kv_tier_fsspec._harness._sshd import SshServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject

__all__ = ["SftpHarness"]


@final
class SftpHarness(FileHarness):
    """An OpenSSH server. Stalls are those of its processes, other faults those of its folder."""

    # SFTP has one word for all that fails: nobody can tell that a folder is full.
    faults = frozenset(Fault) - {Fault.FULL}

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self.server = SshServer(workdir / ".sshd")

    @override
    def start(self) -> None:
        super().start()
        self.server.start()

    @override
    def stop(self) -> None:
        self.server.thaw()
        self.server.stop()
        super().stop()

    @override
    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a folder; mounted for faults as that of a local one is."""
        return self._served(super().settings(opening))

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings whose folder would be below a file."""
        return self._served(super().unusable_settings(opening))

    @override
    def inject(self, subject: Subject, fault: Fault) -> None:
        if fault is Fault.STALL:
            self.server.freeze()
        else:
            super().inject(subject, fault)

    @override
    def heal(self, subject: Subject) -> None:
        self.server.thaw()
        super().heal(subject)

    def _served(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        path = urlsplit(str(settings["url"])).path
        return {
            **settings,
            "url": f"sftp://127.0.0.1{path}",
            "storage_options": self.server.options,
        }
