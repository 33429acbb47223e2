"""Identity of blocks: the key of one block and the namespace that all keys live in.

A key says *which tokens*; the namespace says *whose bytes*: everything besides the tokens that
must be equal for the bytes of one process to be usable by another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final, NewType

from kv_core.errors import HashSeedError, NamespaceError

__all__ = [
    "ALL_RANKS",
    "FORMAT_VERSION",
    "BlockHash",
    "GroupGeometry",
    "Namespace",
    "OffloadKey",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]

BlockHash = NewType("BlockHash", bytes)
"""The prefix cache's chained content hash: equal prefixes of different requests are equal."""

OffloadKey = NewType("OffloadKey", bytes)
"""``block_hash + group_idx`` (4 bytes, big endian). Raw bytes: tuples cost garbage collection."""

FORMAT_VERSION: Final = 1
"""Version of the bytes of a block as kv-core lays them out. Part of every namespace."""

ALL_RANKS: Final = -1
"""Rank of a namespace whose blocks hold the pages of all ranks (scheduler-side tiers)."""

_GROUP_BYTES: Final = 4

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")
_MOST_MODEL_CHARS: Final = 100


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Build the key of one block of one KV cache group.

    Args:
        block_hash: Chained content hash of the block.
        group_idx: Index of the KV cache group, 0 to 2**32 - 1.
    """
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big"))


def get_offload_block_hash(key: OffloadKey) -> BlockHash:
    """Return the block hash that a key was made of."""
    return BlockHash(key[:-_GROUP_BYTES])


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the group index that a key was made of."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Shape of the blocks of one KV cache group.

    Attributes:
        tokens_per_block: Tokens in one offloaded block of the group.
        bytes_per_block: Payload bytes that one rank contributes to one offloaded block.
        num_layers: Layers whose pages the block holds.
        sliding_window: Window in tokens, or ``None`` for full attention.
    """

    tokens_per_block: int
    bytes_per_block: int
    num_layers: int
    sliding_window: int | None = None


# Words that configuration systems write where they mean "I do not know".
_UNKNOWN: Final = frozenset({"", "auto", "none", "null", "unknown", "default", "?"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that makes bytes interchangeable, besides the tokens.

    Two processes may exchange blocks exactly when their namespaces are equal. A field that is
    not known is an error, not a default: a namespace that leaves something out serves wrong
    bytes one day. The tenant's cache salt is no field here; it lives in the block hash.

    Attributes:
        model: Human-readable name of the model, for folder names and listings.
        model_fingerprint: Identity of the weights: see :mod:`kv_core.model_identity`.
        revision: Revision of the model at its source, or ``"local"`` for a local folder whose
            fingerprint already covers it.
        dtype: Data type of the KV cache, for example ``"bfloat16"``; never ``"auto"``.
        kv_layout: Explicit id of the memory layout of one page (never inferred from shapes).
        groups: Geometry of each KV cache group, in group order.
        block_bytes: Payload bytes of one block in the primary tier, all ranks together.
        tokens_per_hash: Tokens that one block hash covers.
        block_size_factor: GPU blocks in one offloaded block.
        tensor_parallel_size: Ranks that split attention heads.
        pipeline_parallel_size: Ranks that split layers.
        prefill_context_parallel_size: Ranks that split the prompt.
        decode_context_parallel_size: Ranks that split the context at decode.
        rank: Rank whose bytes the blocks hold, or :data:`ALL_RANKS`.
        layout_parallel_invariant: Whether the layout is certified to be the same bytes for any
            parallel sizes. Only then do sizes and rank stay out of the fingerprint.
        hash_algorithm: Algorithm of the block hashes, for example ``"sha256_cbor"``.
        hash_seed: Seed of the block hashes, or ``None`` when every process draws its own.
            A random seed is allowed here, and refused by :meth:`require_reproducible_keys`.
        epoch: Counts weight updates.
        epoch_run: What counts them: the same epoch of two runs means different weights. Needed
            from epoch 1 on.
        format_version: Version of the block bytes, :data:`FORMAT_VERSION`.
    """

    model: str
    model_fingerprint: str
    revision: str
    dtype: str
    kv_layout: str
    groups: tuple[GroupGeometry, ...]
    block_bytes: int
    tokens_per_hash: int
    block_size_factor: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    rank: int = ALL_RANKS
    layout_parallel_invariant: bool = False
    hash_algorithm: str
    hash_seed: str | None
    epoch: int = 0
    epoch_run: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for field in (
            "model",
            "model_fingerprint",
            "revision",
            "dtype",
            "kv_layout",
            "hash_algorithm",
        ):
            value = getattr(self, field)
            if not isinstance(value, str) or value.strip().lower() in _UNKNOWN:
                raise NamespaceError(
                    f"namespace field {field!r} is unknown (found {value!r}). Blocks of different "
                    f"{field} values must never mix, so a definite value is needed: set it "
                    "explicitly.",
                    field=field,
                )
        if self.hash_seed is not None and not isinstance(self.hash_seed, str):
            raise NamespaceError(
                f"namespace field 'hash_seed' must be a string or None, found {self.hash_seed!r}",
                field="hash_seed",
            )
        for field, least in (
            ("block_bytes", 1),
            ("tokens_per_hash", 1),
            ("block_size_factor", 1),
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
            ("prefill_context_parallel_size", 1),
            ("decode_context_parallel_size", 1),
            ("rank", ALL_RANKS),
            ("epoch", 0),
            ("format_version", 1),
        ):
            number = getattr(self, field)
            if type(number) is not int or number < least:
                raise NamespaceError(
                    f"namespace field {field!r} must be an integer >= {least}, found {number!r}",
                    field=field,
                )
        if self.epoch and not self.epoch_run:
            raise NamespaceError(
                f"namespace field 'epoch_run' is empty, but 'epoch' is {self.epoch}: say which run "
                "of weight updates is counted, or another run's weights could be taken for these",
                field="epoch_run",
            )
        invariant: object = self.layout_parallel_invariant
        if type(invariant) is not bool:
            # The word "false" is true, and would share blocks between any parallel sizes.
            raise NamespaceError(
                "namespace field 'layout_parallel_invariant' must be True or False, found "
                f"{invariant!r}",
                field="layout_parallel_invariant",
            )
        self._check_groups()

    def _check_groups(self) -> None:
        groups: object = self.groups
        if not isinstance(groups, tuple) or not groups:
            raise NamespaceError(
                "namespace field 'groups' must be a tuple with the geometry of at least one KV "
                f"cache group, found {groups!r}",
                field="groups",
            )
        for index, group in enumerate(groups):
            if not isinstance(group, GroupGeometry):
                raise NamespaceError(
                    f"namespace field 'groups[{index}]' must be a GroupGeometry, found {group!r}",
                    field="groups",
                )
            for name in ("tokens_per_block", "bytes_per_block", "num_layers", "sliding_window"):
                number = getattr(group, name)
                if name == "sliding_window" and number is None:
                    continue
                if type(number) is not int or number < 1:
                    raise NamespaceError(
                        f"namespace field 'groups[{index}].{name}' must be a positive integer, "
                        f"found {number!r}",
                        field="groups",
                    )

    def describe(self) -> dict[str, Any]:
        """Return every field, as plain JSON types, in declaration order."""
        return dataclasses.asdict(self)

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Namespace:
        """Rebuild a namespace from what :meth:`describe` returned.

        Raises:
            NamespaceError: A field is unknown, missing or invalid.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in description:
            if name not in known:
                raise NamespaceError(f"unknown namespace field {name!r}", field=name)
        fields = dict(description)
        try:
            fields["groups"] = tuple(GroupGeometry(**group) for group in fields["groups"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise NamespaceError(f"incomplete namespace description: {error}", field="") from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over every field that decides whether bytes interchange."""
        fields = self.describe()
        # A name for people: two names of one set of weights share their blocks.
        del fields["model"]
        if self.layout_parallel_invariant:
            for name in (
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
                "rank",
            ):
                del fields[name]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        """``<model>_<12 hex digits of the fingerprint>``: safe as a name of a file or an object.

        The fingerprint tells models apart; the name is for people, so it may be mangled.
        """
        model = _UNSAFE.sub("_", self.model)[:_MOST_MODEL_CHARS]
        if model.startswith("."):
            # A leading dot would hide the folder, and ".." must not come through in any disguise.
            model = "_" + model[1:]
        return f"{model}_{self.fingerprint[:12]}"

    @property
    def stored_rank(self) -> int:
        """The rank that names of blocks carry: 0 where every rank's blocks are the same."""
        return 0 if self.rank == ALL_RANKS or self.layout_parallel_invariant else self.rank

    def with_epoch(self, epoch: int, epoch_run: str) -> Namespace:
        """Return the namespace after a weight update: nothing stored before is reachable.

        Args:
            epoch: Number of the update.
            epoch_run: The run of updates that it counts in.
        """
        return dataclasses.replace(self, epoch=epoch, epoch_run=epoch_run)

    def require_reproducible_keys(self, *, needed_by: str) -> None:
        """Refuse a random hash seed.

        Args:
            needed_by: What needs equal keys in every process, for the message.

        Raises:
            HashSeedError: The seed is random.
        """
        # The other two are what Python's own variable may say instead of nothing.
        if self.hash_seed in {None, "", "random"}:
            raise HashSeedError(
                f"{needed_by} keeps blocks beyond this process, but block hashes are seeded at "
                "random in each process, so no other process would ever find them. Set the "
                "environment variable PYTHONHASHSEED to a fixed number (the same in every "
                "process that shares the storage), and let the namespace's 'hash_seed' be that "
                "number if an engine of your own makes the namespace."
            )
