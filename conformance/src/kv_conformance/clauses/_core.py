"""The core clauses: no tier may skip these."""

from __future__ import annotations

from typing import Final

from kv_conformance.clauses._clause import Clause, ClauseKind

__all__ = ["CORE_CLAUSES"]

CORE_CLAUSES: Final[tuple[Clause, ...]] = (
    # -- LOOK: lookups ------------------------------------------------------------------------
    Clause(
        id="LOOK-1",
        sentence="A key that was never stored never yields True.",
        reason="A promised block that is not there costs a failed load and a recompute, each time.",
        reports=("sglang#31881",),
    ),
    Clause(
        id="LOOK-2",
        sentence="A lookup returns at once, and resolves to True or False within "
        "`lookup_deadline_s` while steps go on.",
        reason="A request waits as long as one of its lookups is unknown.",
        reports=("vllm#46713", "vllm#49829"),
    ),
    Clause(
        id="LOOK-3",
        sentence="After a store of a key is reported successful, its lookups resolve to True "
        "within the declared retention.",
        reason="What cannot be found was stored for nothing.",
        reports=("LMCache#1139",),
    ),
    Clause(
        id="LOOK-4",
        sentence="After a load of a key failed because its object is missing or damaged, no "
        "lookup of it yields True until a new store succeeded; after a transient failure, none of "
        "a request alive then, and none before `error_backoff_s` has passed.",
        reason="A hit that cannot be loaded is promised, refused and promised again, for ever; yet "
        "one outage must not empty a persistent tier.",
        reports=("vllm#49176", "sglang#31315"),
    ),
    Clause(
        id="LOOK-5",
        kind=ClauseKind.ALLOWANCE,
        sentence="After None the caller owes nothing but to ask again in a later step, or never.",
        reason="A request can end, or be scheduled elsewhere, before its answer is known.",
        reports=("vllm#35931",),
    ),
    Clause(
        id="LOOK-6",
        sentence="An error of the backend is not a miss: the lookup resolves to False, it is "
        "counted as an error, and the False is not remembered longer than `error_backoff_s`.",
        reason="A throttled bucket must not look like an empty one.",
        reports=("LMCache#5119",),
    ),
    Clause(
        id="LOOK-7",
        sentence="A successful store turns a remembered False of its key into True, for running "
        "requests too.",
        reason="A preempted request comes back for exactly the blocks it has stored itself.",
        reports=("vllm#49176",),
    ),
    Clause(
        id="LOOK-8",
        sentence="No lookup yields True while the key's only store is still in flight.",
        reason="A load that overtakes its store reads nothing, or half of it.",
        reports=("Mooncake#3066",),
    ),
    Clause(
        id="LOOK-9",
        kind=ClauseKind.ALLOWANCE,
        sentence="A False may be remembered for the life of a request, except as LOOK-6 and "
        "LOOK-7 say.",
        reason="Asking the backend again at every step is what makes lookups slow.",
        reports=("vllm#46713",),
    ),
    # -- JOB: jobs ----------------------------------------------------------------------------
    Clause(
        id="JOB-1",
        sentence="Every submitted job is reported exactly once.",
        reason="A lost result pins memory for ever; a second one frees memory that has a new user.",
        reports=("vllm#49947", "dynamo#5012", "dynamo#3730"),
    ),
    Clause(
        id="JOB-2",
        sentence="A job that cannot be served is reported with `success=False`; submit methods "
        "do not raise for it.",
        reason="An engine's step is no place for a backend's exception.",
        reports=("llm-d-kv-cache#514", "vllm#39732"),
    ),
    Clause(
        id="JOB-3",
        sentence="`get_finished_jobs` does not block and returns everything that is finished.",
        reason="It is called once in every step of the scheduler.",
        reports=("vllm#46713",),
    ),
    Clause(
        id="JOB-4",
        sentence="An empty job is reported.",
        reason="Filters leave empty jobs behind; who waits for one waits for ever.",
    ),
    Clause(
        id="JOB-5",
        sentence="Every job ends within `job_deadline_s`, also when the backend stalls; only a job "
        "whose I/O cannot be withdrawn stays unreported until it no longer touches its slots, and "
        "is counted as stalled. A job that has not begun always fails in time.",
        reason="A stalled disk must cost a recompute and not a request.",
        reports=("vllm#49829", "vllm#49820", "vllm#56828"),
    ),
    Clause(
        id="JOB-6",
        sentence="The end of a request does not lose the results of its jobs.",
        reason="The slots of the job are pinned until its result comes.",
        reports=("vllm#48102", "dynamo#3730"),
    ),
    Clause(
        id="JOB-7",
        sentence="An exception in one job, callback or worker thread fails that job only; later "
        "jobs run.",
        reason="One bad object must not end the cache of a server that runs for months.",
        reports=("sglang#38428",),
    ),
    Clause(
        id="JOB-8",
        sentence="A load is not stuck behind a backlog of stores.",
        reason="A user waits for the load and nobody for the stores.",
        reports=("vllm#49225",),
    ),
    Clause(
        id="JOB-9",
        sentence="A job that failed says why: `missing` or `damaged` for an object that is gone or "
        "spoilt, `declined` for a storage without room, `failed` or `stalled` for the backend.",
        reason="The engine counts failures of the backend against the tier, and nothing else: a "
        "full disk is no broken disk, and a lost object no outage.",
        reports=("LMCache#4364", "LMCache#5119"),
    ),
    # -- DATA: the bytes ------------------------------------------------------------------------
    Clause(
        id="DATA-1",
        sentence="What was stored under a key is what is loaded, into any slots.",
        reason="A wrong byte is a wrong answer that nobody notices.",
        reports=("LMCache#4385", "LMCache#4991"),
    ),
    Clause(
        id="DATA-2",
        sentence="No slot is read after its job is reported.",
        reason="The slot has a new owner by then, and the new owner's bytes would be stored.",
        reports=("vllm#45704",),
    ),
    Clause(
        id="DATA-3",
        sentence="A load writes its own slots only; of those, only the ones it reports as loaded "
        "may be relied on.",
        reason="Every other byte of the region belongs to somebody else.",
        reports=("LMCache#4385",),
    ),
    Clause(
        id="DATA-4",
        sentence="A store never writes the primary tier.",
        reason="The block is being read by others while it is stored.",
    ),
    Clause(
        id="DATA-5",
        sentence="No slot is written after its job is reported.",
        reason="The slot has a new owner by then, whose bytes would be lost.",
        reports=("vllm#47282", "sglang#28468"),
    ),
    Clause(
        id="DATA-6",
        sentence="`successful_keys` is a subset of the job's keys and true, for loads and stores.",
        reason="The engine hands out exactly what it names.",
        reports=("vllm#50321", "dynamo#15079"),
    ),
    Clause(
        id="DATA-7",
        sentence="Distinct keys never alias: group index, high bits, letter case, separators and "
        "NUL bytes all count.",
        reason="Two keys in one place are one request with another's context.",
        reports=("LMCache#4385",),
    ),
    Clause(
        id="DATA-8",
        sentence="A failed store never leaves an object that reads back wrong.",
        reason="What failed is found again later, by a request that knows nothing of the failure.",
        reports=("LMCache#4991",),
    ),
    Clause(
        id="DATA-9",
        sentence="Publication is atomic: no reader sees a torn block, and of many writers of one "
        "key all succeed.",
        reason="Engines that share a store compute the same prefix at the same time.",
        reports=("LMCache#2517",),
    ),
    Clause(
        id="DATA-10",
        sentence="A missing, truncated or over-long object is a failed load; the object is "
        "retired, and a later store repairs it.",
        reason="Objects are removed and cut off by others; the key must not be lost for ever.",
        reports=("LMCache#2420", "Mooncake#3066", "vllm#54363"),
    ),
    Clause(
        id="DATA-11",
        sentence="Errors of the storage, short transfers, a full disk and a lack of descriptors "
        "are failures that leave the tier consistent and working.",
        reason="All of them happen, and pass.",
        reports=("LMCache#4364", "LMCache#4546"),
    ),
    # -- ZC: zero copy --------------------------------------------------------------------------
    Clause(
        id="ZC-1",
        sentence="The primary tier is used in place: it is never copied as a whole, and extra "
        "memory in flight stays within `staging_bytes`.",
        reason="A second copy of the cache is memory that the cache does not have.",
        reports=("LMCache#2942",),
    ),
    Clause(
        id="ZC-2",
        sentence="A store reads the shared pages when it runs, and what was written to a slot "
        "before submit is what is stored.",
        reason="Bytes that were set aside earlier are another block's by now.",
        reports=("vllm#45704",),
    ),
    Clause(
        id="ZC-3",
        sentence="After `shutdown()` the tier holds no export of the view: releasing and unmapping "
        "it succeed.",
        reason="An export that is kept is a region that is never given back.",
    ),
    Clause(
        id="ZC-4",
        sentence="Blocks are addressed through `block()` or `address()`: padding between rows and "
        "odd sizes are honoured.",
        reason="Rows are padded for alignment; who multiplies by `block_bytes` reads the padding.",
        reports=("vllm#55424", "Mooncake#4024"),
    ),
    # -- BLOCK: the scheduler's thread ---------------------------------------------------------
    Clause(
        id="BLOCK-1",
        sentence="Lookup, submit, poll and the callbacks of requests and steps do no blocking I/O "
        "on the calling thread, also while the backend is stalled.",
        reason="The calling thread schedules every request of the engine.",
        reports=("vllm#46713", "vllm#45765"),
    ),
    # -- DRAIN: bringing jobs to an end --------------------------------------------------------
    Clause(
        id="DRAIN-1",
        sentence="After `drain_jobs` no I/O of the tier touches the primary tier, and every result "
        "is available.",
        reason="The region is about to be reset or unmapped.",
        reports=("vllm#48102",),
    ),
    Clause(
        id="DRAIN-2",
        sentence="The drain of an idle tier returns at once.",
        reason="Engines drain before every reset, most often with nothing in flight.",
    ),
    Clause(
        id="DRAIN-3",
        kind=ClauseKind.ALLOWANCE,
        sentence="A drain may cancel jobs that have not begun; their results still appear.",
        reason="Carrying a long queue out would take longer than anybody wants to wait.",
    ),
    Clause(
        id="DRAIN-4",
        sentence="A drain ends within `job_deadline_s` and returns the ids of the jobs whose I/O "
        "could not be stopped.",
        reason="A reset must not hang on a dead disk, and must know which slots stay in use.",
        reports=("vllm#48102",),
    ),
    Clause(
        id="DRAIN-5",
        sentence="The tier works after a drain.",
        reason="A reset is no shutdown.",
    ),
    # -- LIFE: from the constructor to the end ---------------------------------------------------
    Clause(
        id="LIFE-1",
        sentence="`shutdown` is idempotent.",
        reason="Engines end in more ways than one, and two of them at once.",
    ),
    Clause(
        id="LIFE-2",
        sentence="After `shutdown` no thread, process, socket or descriptor of the tier is left.",
        reason="Servers open and close engines for weeks in one process.",
        reports=("LMCache#1495",),
    ),
    Clause(
        id="LIFE-3",
        sentence="A shutdown with jobs in flight ends within `job_deadline_s`, and nothing touches "
        "the view afterwards.",
        reason="The view is unmapped next: a late write is a crash, or another's bytes.",
        reports=("dynamo#5012",),
    ),
    Clause(
        id="LIFE-4",
        sentence="A constructor that fails leaves nothing behind.",
        reason="Opening is tried again, with other settings, in the same process.",
        reports=("nixl#1605",),
    ),
    Clause(
        id="LIFE-5",
        sentence="Two instances in one process do not interfere.",
        reason="One process runs several engines, and one engine several tiers of a type.",
        reports=("LMCache#2517",),
    ),
    Clause(
        id="LIFE-6",
        sentence="Used in a forked child, the tier raises a clear error or works; it never hangs.",
        reason="A fork has none of the tier's threads, and locks may be held in it for ever.",
    ),
    # -- REQ: requests --------------------------------------------------------------------------
    Clause(
        id="REQ-1",
        sentence="`on_new_request` returns a RequestOffloadingContext with a known policy.",
        reason="The engine decides by it which blocks of the request the tier is offered.",
    ),
    Clause(
        id="REQ-2",
        sentence="`on_request_finished` frees what is kept for the request, is idempotent, and "
        "tolerates unknown requests.",
        reason="A server sees millions of requests, some of which end before they begin.",
        reports=("vllm#35931", "LMCache#1495"),
    ),
    # -- CONF: settings and declarations ---------------------------------------------------------
    Clause(
        id="CONF-1",
        sentence="Missing, unknown and invalid settings are refused at construction, by name.",
        reason="A misspelt limit that is ignored is a disk that fills up.",
        reports=("LMCache#4725",),
    ),
    Clause(
        id="CONF-2",
        sentence="Secrets appear in no repr, log, error, metric or dump.",
        reason="Logs are copied into tickets.",
    ),
    Clause(
        id="CONF-3",
        sentence="The declaration of the tier is well formed: known capabilities only, a contract "
        "version that this suite knows, and limits that follow the settings.",
        reason="The engine acts on it.",
        reports=("vllm#58088",),
    ),
    # -- NS: namespaces -------------------------------------------------------------------------
    Clause(
        id="NS-1",
        sentence="A change in any field of the namespace that its fingerprint covers makes every "
        "earlier block unreachable.",
        reason="The bytes of another model, layout or revision have the right length.",
        reports=("vllm#49261", "vllm#55904", "vllm#49440", "vllm#55191", "vllm#56772"),
    ),
    Clause(
        id="NS-2",
        sentence="Where blocks persist, the same namespace in a fresh process finds them.",
        reason="A cache that is empty after every restart is no cache.",
        reports=("LMCache#1139", "vllm#42625"),
    ),
    # -- GEO: block sizes -----------------------------------------------------------------------
    Clause(
        id="GEO-1",
        sentence="Blocks from 512 bytes to 64 MiB (or the declared `max_block_bytes`) work, "
        "multiples of 4096 or not, in several groups.",
        reason="The size follows from the model; nobody chooses it.",
        reports=("vllm#55424", "vllm#43674", "Mooncake#2348"),
    ),
    # -- MET: measurements ----------------------------------------------------------------------
    Clause(
        id="MET-1",
        sentence="queries = hits + misses + errors, counted once per request and key when it "
        "resolves; a hit whose load fails becomes a miss, and the failure moves its counter "
        "within one poll.",
        reason="Operators act on these numbers.",
        reports=("vllm#30522", "vllm#57596", "LMCache#5119"),
    ),
)
