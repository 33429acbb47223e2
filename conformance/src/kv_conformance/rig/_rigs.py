"""Makes rigs: what a test asks for, opened the way an engine opens a tier."""

from __future__ import annotations

import hashlib
import itertools
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, final

from kv_conformance.harness import Deadlines, HarnessError, Opening
from kv_conformance.rig._findings import Findings
from kv_conformance.rig._memory import Region
from kv_conformance.rig._peer import Peer, PeerOrder
from kv_conformance.rig._rig import Rig
from kv_core.contract import make_offload_key, parse_tier_config
from kv_core.errors import KVCoreError
from kv_core.plugins import open_tier
from kv_core.tierkit.testing import example_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kv_conformance.harness import Harness
    from kv_conformance.rig._budget import Budget
    from kv_conformance.rig._findings import Violation
    from kv_core.contract import Namespace, OffloadKey, TierLimits, TierSpec

__all__ = ["CannotOpenError", "RecordedMetrics", "Rigs", "SubjectType", "namespace_of"]


class CannotOpenError(HarnessError):
    """The tier cannot be opened, although nothing special was asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class SubjectType:
    """The tier type under test.

    Attributes:
        name: Type of the tier.
        origin: Package and version it comes from.
        spec: Its declaration.
        harness: Its harness.
        reference: How a helper process finds it: a tier type, or ``module:function``.
        workdir: Folder of this tier in this run.
    """

    name: str
    origin: str
    spec: TierSpec
    harness: Harness
    reference: str
    workdir: Path


def _other_declaration(tested: TierSpec, opened: TierSpec) -> HarnessError:
    """Return the error for a harness that has a tier tested by what it does not declare."""
    names = [
        ", ".join(sorted(capability.name for capability in spec.capabilities)) or "nothing"
        for spec in (tested, opened)
    ]
    return HarnessError(
        f"the spec of the harness declares {names[0]}, but with the settings of the harness the "
        f"tier declares {names[1]}: the harness must carry what TierSpec.refine returns for its "
        "own settings"
    )


def _special(opening: Opening) -> str:
    """Return what is not as usual in an opening, for messages."""
    usual = Opening(storage=opening.storage, block_bytes=4096)
    changes = [
        f"{field.name}={getattr(opening, field.name)}"
        for field in fields(opening)
        if getattr(opening, field.name) != getattr(usual, field.name)
    ]
    return f" ({', '.join(changes)})" if changes else ""


@final
class RecordedMetrics:
    """A metrics sink that keeps everything, for the search for secrets."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, name: str, amount: float = 1.0) -> None:  # noqa: ARG002
        """Note the name."""
        self.names.add(name)

    def set(self, name: str, value: float) -> None:  # noqa: ARG002
        """Note the name."""
        self.names.add(name)

    def observe(self, name: str, value: float) -> None:  # noqa: ARG002
        """Note the name."""
        self.names.add(name)


def namespace_of(block_bytes: int, **changes: Any) -> Namespace:
    """Return a complete namespace, with the given fields changed."""
    own = {
        "model": "conformance/model",
        "model_fingerprint": "c0ffee0123456789",
        "kv_layout": "conformance",
    }
    return example_namespace(block_bytes, **{**own, **changes})


@final
class Rigs:
    """Opens rigs for one test, and closes them after it.

    Args:
        subject_type: What is tested.
        test: Name of the test: storages are named after it.
        budget: The time for waits.
        report: Receives violations.

    Attributes:
        findings: Where tests put violations.
        has_opened: Whether the tier could be opened, in this process, at least once.
    """

    def __init__(
        self,
        subject_type: SubjectType,
        test: str,
        budget: Budget,
        report: Callable[[Violation], None],
    ) -> None:
        self.subject_type = subject_type
        self.budget = budget
        self.findings = Findings(report)
        self.has_opened = False
        self._test = test
        self._storages = itertools.count(1)
        self._keys = itertools.count(1)
        self._open: list[Rig | Peer] = []

    # -- names ----------------------------------------------------------------------------------

    @property
    def spec(self) -> TierSpec:
        """The declaration of the tier."""
        return self.subject_type.spec

    @property
    def harness(self) -> Harness:
        """The harness of the tier."""
        return self.subject_type.harness

    def storage(self) -> str:
        """Return the name of a storage that nobody has used."""
        digest = hashlib.sha256(self._test.encode()).hexdigest()[:8]
        return f"{self._test[:24]}-{digest}-{next(self._storages)}".replace("_", "-")

    def key(self, group_idx: int = 0) -> OffloadKey:
        """Return a key that nobody has used in this test."""
        text = f"{self._test}/{next(self._keys)}"
        return make_offload_key(hashlib.sha256(text.encode()).digest(), group_idx)

    def keys(self, count: int, group_idx: int = 0) -> list[OffloadKey]:
        """Return keys that nobody has used in this test."""
        return [self.key(group_idx) for _ in range(count)]

    # -- rigs -----------------------------------------------------------------------------------

    def limits(self, opening: Opening | None = None) -> TierLimits:
        """Return what the tier declares for the settings of an opening, without opening it."""
        settings = self.harness.settings(opening or self.opening())
        config = parse_tier_config(self.spec.type, self.spec.config_model, settings)
        limits: TierLimits = self.spec.limits(config)
        return limits

    def opening(self, **changes: Any) -> Opening:
        """Return an opening of a new storage, with the given fields changed."""
        return Opening(**{"storage": self.storage(), "block_bytes": 4096, **changes})

    def open(
        self,
        *,
        storage: str | None = None,
        num_blocks: int = 32,
        block_bytes: int = 4096,
        row_stride: int | None = None,
        namespace: Namespace | None = None,
        deadlines: Deadlines | None = None,
        capacity_blocks: int | None = None,
        faults: bool = False,
        retention_blocks: int = 64,
        settings: Mapping[str, Any] | None = None,
    ) -> Rig:
        """Open the tier over a region of its own.

        Args:
            storage: Name of the storage; by default an empty one.
            num_blocks: Slots of the region.
            block_bytes: Payload bytes of a slot.
            row_stride: Bytes from slot to slot; by default ``block_bytes``.
            namespace: By default the same one for every rig of a block size.
            deadlines: Limits to ask for; by default long ones.
            capacity_blocks: See :class:`~kv_conformance.harness.Opening`.
            faults: See there.
            retention_blocks: See there.
            settings: Instead of what the harness says.

        Raises:
            HarnessError: The tier cannot be opened, although nothing is wrong: a
                :class:`CannotOpenError` where the opening is the usual one.
        """
        opening = Opening(
            storage=storage or self.storage(),
            block_bytes=block_bytes,
            deadlines=deadlines or Deadlines(),
            capacity_blocks=capacity_blocks,
            faults=faults,
            retention_blocks=retention_blocks,
        )
        usual = settings is None and namespace is None and not _special(opening)
        failure = CannotOpenError if usual else HarnessError
        if settings is None:
            settings = self._settings(opening, failure)
        namespace = namespace or namespace_of(block_bytes)
        region = Region(num_blocks, block_bytes, row_stride or block_bytes)
        metrics = RecordedMetrics()
        try:
            opened = open_tier(
                self.spec,
                name=self.spec.type,
                settings=settings,
                namespace=namespace,
                primary=region.primary,
                clock=time.monotonic,
                metrics=metrics,
            )
        except KVCoreError as error:
            region.unmap()
            raise failure(
                f"the tier cannot be opened with the settings of its harness{_special(opening)}: "
                f"{error}"
            ) from error
        self.has_opened = True
        if usual and opened.spec.capabilities != self.spec.capabilities:
            raise _other_declaration(self.spec, opened.spec)
        rig = Rig(
            subject_type=self.subject_type,
            tier=opened.manager,
            limits=opened.limits,
            namespace=namespace,
            opening=opening,
            settings=settings,
            region=region,
            findings=self.findings,
            budget=self.budget,
            metrics=metrics,
        )
        self._open.append(rig)
        return rig

    def _settings(self, opening: Opening, failure: type[HarnessError]) -> Mapping[str, Any]:
        try:
            return self.harness.settings(opening)
        except HarnessError:
            raise
        except Exception as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            raise failure(
                f"settings() of the harness raised {type(error).__name__}: {error} "
                f"(at {last.filename}:{last.lineno})"
            ) from error

    def peer(
        self,
        *,
        storage: str,
        num_blocks: int = 32,
        block_bytes: int = 4096,
        row_stride: int | None = None,
        namespace: Namespace | None = None,
        deadlines: Deadlines | None = None,
        capacity_blocks: int | None = None,
        retention_blocks: int = 64,
        settings: Mapping[str, Any] | None = None,
    ) -> Peer:
        """Open the tier in another process, with the arguments of :meth:`open`.

        Returns at once; the first call waits until the tier is open.
        """
        opening = Opening(
            storage=storage,
            block_bytes=block_bytes,
            deadlines=deadlines or Deadlines(),
            capacity_blocks=capacity_blocks,
            retention_blocks=retention_blocks,
        )
        if settings is None:
            settings = self.harness.settings(opening)
        config = parse_tier_config(self.spec.type, self.spec.config_model, settings)
        limits = self.spec.limits(config)
        peer = Peer(
            PeerOrder(
                reference=self.subject_type.reference,
                workdir=self.subject_type.workdir,
                scale=self.budget.scale,
                options={
                    "storage": storage,
                    "num_blocks": num_blocks,
                    "block_bytes": block_bytes,
                    "row_stride": row_stride,
                    "namespace": namespace,
                    "deadlines": deadlines,
                    "capacity_blocks": capacity_blocks,
                    "retention_blocks": retention_blocks,
                    "settings": dict(settings),
                },
            ),
            findings=self.findings,
            budget=self.budget,
            # The peer gives up before: its message says more.
            limit_s=2 * (limits.job_deadline_s + limits.lookup_deadline_s),
        )
        self._open.append(peer)
        return peer

    def close(self) -> None:
        """Close every rig and peer, the last first, also when one of them complains."""
        with ExitStack() as stack:
            for opened in self._open:
                stack.callback(opened.close)
            self._open = []
