"""The harness for a container of an Azure blob store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobServiceClient
from typing_extensions import override

from kv_conformance.harness import Corruption, Fault
from kv_core.tierkit.objects import ObjectNames
from kv_tier_fsspec import kv_core_register_tier
from kv_tier_fsspec._harness._azurite import AzuriteServer
from kv_tier_fsspec._harness._base import ObjectHarness, key_of
from kv_tier_fsspec._harness._gate import ConnectionGate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kv_conformance.harness import Opening, Subject
    from kv_core.contract import OffloadKey

__all__ = ["AzHarness"]

_CONTAINER: Final = "kv-conformance"


@final
class AzHarness(ObjectHarness):
    """An Azurite server. Stalls are those of its process; errors are connections that break off."""

    spec = kv_core_register_tier()
    # A request that hangs is given up.
    stall_can_be_interrupted = True
    faults = frozenset({Fault.STALL, Fault.ERROR})

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self.server = AzuriteServer(workdir / ".azurite")
        self._gate: ConnectionGate | None = None
        self._service: Any = None

    @override
    def start(self) -> None:
        self.server.start()
        self._gate = ConnectionGate(self.server.port)
        self._service = BlobServiceClient.from_connection_string(self.server.connection_string())
        self._service.create_container(_CONTAINER)

    @override
    def stop(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self.server.thaw()
        self.server.stop()

    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a prefix; through the gate if faults will be injected."""
        port = self._gate.port if opening.faults and self._gate is not None else None
        return {
            **self.object_settings(opening, f"az://{_CONTAINER}/{opening.storage}"),
            "storage_options": {"connection_string": self.server.connection_string(port)},
        }

    @override
    def unusable_settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return settings with a container that does not exist."""
        return {**self.settings(opening), "url": "az://no-such-container/prefix"}

    def lose(self, subject: Subject, key: OffloadKey) -> None:
        """Remove the blob of a key.

        Raises:
            KeyError: There is none.
        """
        try:
            self._blob(subject, key).delete_blob()
        except ResourceNotFoundError:
            raise KeyError(key) from None

    def corrupt(self, subject: Subject, key: OffloadKey, how: Corruption) -> None:
        """Replace the blob of a key by a damaged one.

        Raises:
            KeyError: There is none.
        """
        blob = self._blob(subject, key)
        try:
            content = blob.download_blob().readall()
        except ResourceNotFoundError:
            raise KeyError(key) from None
        blob.upload_blob(how.damage(content), overwrite=True)

    def list_keys(self, subject: Subject) -> Collection[OffloadKey]:
        """Return the keys that have a blob."""
        names = _names(subject)
        container = self._service.get_container_client(_CONTAINER)
        found = set()
        for name in container.list_blob_names(name_starts_with=f"{names.blocks}/"):
            key = names.key_of(name)
            if key is None:
                key = key_of(names, name, container.download_blob(name).readall())
            if key is not None:
                found.add(key)
        return found

    def inject(self, subject: Subject, fault: Fault) -> None:  # noqa: ARG002
        """Freeze the server, or shut the way to it."""
        if fault is Fault.STALL:
            self.server.freeze()
        elif self._gate is not None:
            self._gate.shut()

    def heal(self, subject: Subject) -> None:  # noqa: ARG002
        """End the fault. Idempotent."""
        self.server.thaw()
        if self._gate is not None:
            self._gate.open()

    def _blob(self, subject: Subject, key: OffloadKey) -> Any:
        return self._service.get_blob_client(_CONTAINER, _names(subject).block(key))


def _names(subject: Subject) -> ObjectNames:
    return ObjectNames(subject.opening.storage, subject.namespace)
