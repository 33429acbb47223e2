"""NS: namespaces keep bytes apart that are not interchangeable."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Final

from kv_conformance.rig import expect
from kv_conformance.rig._rigs import namespace_of
from kv_conformance.run._case import case
from kv_core.contract import Capability, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_conformance.rig import Rigs

_BLOCK_BYTES: Final = 4096

# With an epoch, so that its run counts.
_STORED: Final = namespace_of(_BLOCK_BYTES, epoch=1, epoch_run="first")


def _changes() -> Iterator[tuple[str, Namespace]]:
    """Yield one namespace for every way in which a field can differ, with what differs."""
    for field in dataclasses.fields(Namespace):
        value = getattr(_STORED, field.name)
        if field.name == "groups":
            yield from _changed_groups()
        elif field.name == "block_bytes":
            yield _changed(field.name, value // 2)
        elif isinstance(value, bool):
            yield _changed(field.name, not value)
        elif isinstance(value, int):
            yield _changed(field.name, value + 1)
        elif isinstance(value, str):
            # Longer, in another case where there is one, and unfit for the name of a file.
            others = {f"{value}0", value.swapcase(), f"{value}/"} - {value}
            yield from (_changed(field.name, other) for other in sorted(others))
        else:
            raise TypeError(f"the suite cannot change {field.name}={value!r} of a namespace")


def _changed(name: str, value: Any) -> tuple[str, Namespace]:
    return f"{name}={value!r}", dataclasses.replace(_STORED, **{name: value})


def _changed_groups() -> Iterator[tuple[str, Namespace]]:
    group = _STORED.groups[0]
    for field in dataclasses.fields(group):
        value = (getattr(group, field.name) or 0) + 1
        yield _changed("groups", (dataclasses.replace(group, **{field.name: value}),))
    yield _changed("groups", (group, group))


def _shifted() -> Iterator[tuple[str, Namespace]]:
    """Yield namespaces that read the same when their fields are written without separators."""
    names = [
        field.name
        for field in dataclasses.fields(Namespace)
        if isinstance(getattr(_STORED, field.name), str)
    ]
    for left, right in itertools.pairwise(names):
        before, after = getattr(_STORED, left), getattr(_STORED, right)
        if len(after) > 1:
            moved: dict[str, Any] = {left: before + after[0], right: after[1:]}
        else:
            moved = {left: before[:-1], right: before[-1] + after}
        yield f"{moved}", dataclasses.replace(_STORED, **moved)


def _expect_apart(rigs: Rigs, others: Iterator[tuple[str, Namespace]]) -> None:
    """Store blocks, and expect other namespaces over the same storage to reach none of them."""
    storage = rigs.storage()
    rig = rigs.open(storage=storage, namespace=_STORED, num_blocks=8)
    keys = rigs.keys(2)
    rig.stored(keys)
    if Capability.SHARED not in rigs.spec.capabilities:
        # The storage may be for one instance at a time.
        rig.shutdown()
    for difference, namespace in others:
        if namespace.fingerprint == _STORED.fingerprint:
            # A name for people: the bytes are the same.
            continue
        other = rigs.open(
            storage=storage, namespace=namespace, block_bytes=namespace.block_bytes, num_blocks=8
        )
        expect(
            not any(other.resolve(keys)),
            f"a block was stored in one namespace and found in another with {difference}",
        )
        for key in keys:
            expect(
                not other.load([key]).keys,
                f"a block was stored in one namespace and loaded in another with {difference}",
            )
        other.shutdown()


@case("NS-1")
def test_a_change_of_any_field_hides_every_block(rigs: Rigs) -> None:
    """Each field of the namespace and of its groups by itself, in several ways."""
    _expect_apart(rigs, _changes())


@case("NS-1")
def test_fields_of_a_namespace_do_not_run_into_each_other(rigs: Rigs) -> None:
    """What one field ends with is not what the next one begins with."""
    _expect_apart(rigs, _shifted())


@case("NS-1")
def test_a_block_of_another_namespace_does_not_stand_in_for_a_store(rigs: Rigs) -> None:
    """After the weights have changed, the same prompts are stored again, and not skipped."""
    storage = rigs.storage()
    rig = rigs.open(storage=storage, namespace=_STORED, num_blocks=8)
    keys = rigs.keys(2)
    rig.stored(keys)
    if Capability.SHARED not in rigs.spec.capabilities:
        rig.shutdown()
    namespace = dataclasses.replace(_STORED, epoch=_STORED.epoch + 1)
    other = rigs.open(storage=storage, namespace=namespace, num_blocks=8)
    other.stored(keys, clause="NS-1")
    expect(
        all(other.resolve(keys)),
        "a block was stored in one namespace, stored successfully in another with a later epoch, "
        "and not found there",
    )
    other.expect_loads(keys, clause="NS-1")


@case("NS-2")
def test_a_fresh_process_finds_what_persists(rigs: Rigs) -> None:
    """Another interpreter, with other salts of its own, opens the same storage."""
    storage = rigs.storage()
    rig = rigs.open(storage=storage)
    keys = rigs.keys(4)
    rig.stored(keys)
    rig.shutdown()
    if Capability.PERSISTENT not in rigs.spec.capabilities:
        # Nothing is promised but that the tier opens again, and answers.
        rigs.open(storage=storage).resolve(keys)
        return
    peer = rigs.peer(storage=storage)
    found = peer.resolve(keys)
    expect(
        all(found),
        f"{found.count(False)} of {len(keys)} blocks were not found in a fresh process, under the "
        "same namespace",
    )
    loaded = peer.load(keys)
    expect(
        len(loaded) == len(keys),
        f"{len(keys) - len(loaded)} of {len(keys)} blocks could not be loaded in a fresh process",
    )


@case("NS-2")
def test_what_a_fresh_process_stores_is_found_after_it(rigs: Rigs) -> None:
    """The other way round: the process that stored has ended."""
    if Capability.PERSISTENT not in rigs.spec.capabilities:
        return
    storage = rigs.storage()
    keys = rigs.keys(4)
    peer = rigs.peer(storage=storage)
    peer.stored(keys)
    peer.close()
    rig = rigs.open(storage=storage)
    expect(all(rig.resolve(keys)), "blocks were not found after the process that stored had ended")
    rig.expect_loads(keys)
