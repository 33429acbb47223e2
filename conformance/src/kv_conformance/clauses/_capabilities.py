"""The clauses of capabilities, declared and not declared."""

from __future__ import annotations

from typing import Final

from kv_conformance.clauses._clause import Clause
from kv_core.contract import Capability

__all__ = ["CAPABILITY_CLAUSES"]

CAPABILITY_CLAUSES: Final[tuple[Clause, ...]] = (
    Clause(
        id="PERS-1",
        capability=Capability.PERSISTENT,
        sentence="A tier that is reopened under the same namespace finds its blocks.",
        reason="It is what the word means.",
    ),
    Clause(
        id="PERS-2",
        capability=Capability.PERSISTENT,
        sentence="A `kill -9` at any moment leaves every block whole or gone.",
        reason="Containers are killed, and in the middle of a write.",
        reports=("Mooncake#1139",),
    ),
    Clause(
        id="PERS-3",
        capability=Capability.PERSISTENT,
        sentence="Leftovers of dead writers are reclaimed; those of live writers are kept.",
        reason="Every crash would take some of the disk, and every start some of a neighbour's "
        "work.",
        reports=("Mooncake#1139",),
    ),
    Clause(
        id="SHARE-1",
        capability=Capability.SHARED,
        sentence="An instance sees another's blocks within `visibility_delay_s`.",
        reason="Replicas share a store in order to share their work.",
    ),
    Clause(
        id="SHARE-2",
        capability=Capability.SHARED,
        sentence="Sixteen writers of one key over four processes all succeed, and leave one "
        "object with the right bytes.",
        reason="All replicas compute a popular prefix at the same time.",
        reports=("LMCache#2517",),
    ),
    Clause(
        id="CAP-1",
        capability=Capability.BOUNDED,
        sentence="The limit of capacity holds under concurrent stores.",
        reason="A full disk takes the machine down and not only the cache.",
        reports=("vllm#54779", "LMCache#4725", "Tanguille#4636"),
    ),
    Clause(
        id="CAP-2",
        capability=Capability.BOUNDED,
        sentence="What was used least recently goes first, and never a block that is in use.",
        reason="Evicting what is needed next is worse than no cache.",
        reports=("sglang#28468", "Mooncake#4153"),
    ),
    Clause(
        id="CAP-3",
        capability=Capability.BOUNDED,
        sentence="After a restart, what is there already counts before the first store.",
        reason="Otherwise every restart adds a whole capacity to the disk.",
        reports=("LMCache#4564", "LMCache#1454"),
    ),
    Clause(
        id="CAP-4",
        capability=Capability.BOUNDED,
        sentence="A thousand blocks that come and go leave the accounting where it was.",
        reason="An account that only grows ends with an empty disk that is refused as full.",
        reports=("LMCache#4546",),
    ),
    Clause(
        id="INT-1",
        capability=Capability.INTEGRITY,
        sentence="One flipped byte is a failed load; the object is retired and the counter moves.",
        reason="Disks, networks and neighbours change bytes.",
        reports=("vllm#54363",),
    ),
    Clause(
        id="EVT-1",
        capability=Capability.EVENTS,
        sentence="The tier's own events, applied to the listing at its opening, give its listing "
        "now.",
        reason="Routers send requests where events say the blocks are.",
        reports=("vllm#47923", "LMCache#3532"),
    ),
    Clause(
        id="EVT-2",
        capability=Capability.EVENTS,
        sentence="Per key, stored precedes removed, and failures emit nothing.",
        reason="A consumer applies events in the order in which they come.",
        reports=("vllm#47923", "vllm#43468"),
    ),
    Clause(
        id="DEL-1",
        capability=Capability.DELETE,
        sentence="Deleted keys resolve to False from the return of `delete` on, their space is "
        "freed, and they can be stored again.",
        reason="A block that is deleted for a reason must not be served again.",
    ),
    Clause(
        id="USE-1",
        capability=Capability.USAGE,
        sentence="Blocks, bytes and capacities reported by `usage` equal the listing.",
        reason="Dashboards and routers plan with them.",
        reports=("llm-d-router#1650", "LMCache#4564"),
    ),
    Clause(
        id="TOUCH-1",
        capability=Capability.TOUCH,
        sentence="Touched blocks outlive untouched ones.",
        reason="What the primary tier serves is in use, though this tier never sees a load of it.",
    ),
    Clause(
        id="WITHDRAW-1",
        capability=Capability.WITHDRAWS_IO,
        sentence="Every job ends within `job_deadline_s` without exception: running I/O is "
        "withdrawn.",
        reason="The engine keeps no quarantine ready for such a tier.",
        reports=("vllm#49829",),
    ),
    # -- What must not be there when it is not declared --------------------------------------------
    Clause(
        id="UNDECLARED-PERSISTENT",
        capability=Capability.PERSISTENT,
        absent=True,
        sentence="Without PERSISTENT, a tier that is reopened finds nothing.",
        reason="The engine asks for reproducible keys only where blocks persist: with a random "
        "hash seed, what is found again is another's.",
        reports=("LMCache#1139", "vllm#47636"),
    ),
    Clause(
        id="UNDECLARED-EVENTS",
        capability=Capability.EVENTS,
        absent=True,
        sentence="Without EVENTS, `take_events` is empty.",
        reason="Half of the events is worse than none: a consumer believes them.",
    ),
    Clause(
        id="UNDECLARED-DELETE",
        capability=Capability.DELETE,
        absent=True,
        sentence="Without DELETE, `delete` raises UnsupportedError and removes nothing.",
        reason="Silence would pass for success.",
    ),
    Clause(
        id="UNDECLARED-USAGE",
        capability=Capability.USAGE,
        absent=True,
        sentence="Without USAGE, `usage` raises UnsupportedError.",
        reason="A made-up number is worse than none.",
    ),
    Clause(
        id="UNDECLARED-TOUCH",
        capability=Capability.TOUCH,
        absent=True,
        sentence="Without TOUCH, `touch` changes nothing and does not raise.",
        reason="Engines touch whatever they serve, whoever keeps a copy.",
    ),
)
