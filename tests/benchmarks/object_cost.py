"""What does a million tokens cost in an object store: requests, bytes, and money?

Run ``python tests/benchmarks/object_cost.py`` for the tables of ``docs/object-cost.md``; with
``--layers``, ``--kv-heads``, ``--head-dim`` and ``--dtype-bytes`` for a model of your own; with
``--put-price``, ``--get-price`` and ``--month-price`` for what your store takes. Nothing is
measured in seconds: requests are counted by running the tier over a store that counts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from kv_core.contract import ReqContext, TierConfig, parse_tier_config
from kv_core.tierkit.objects import TRAILER_BYTES
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_fsspec import ObjectConfig
from kv_tier_fsspec.store import ObjectTier, scatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from kv_tier_fsspec.store import ObjectStore

__all__ = ["MODELS", "Geometry", "Traffic", "count_requests", "tables"]

_TOKENS: Final = 1_000_000
_ROW_BYTES: Final = 4096
_KIB: Final = 2**10
_MIB: Final = 2**20
_GB: Final = 1e9
BLOCK_TOKENS: Final = (16, 64, 256, 1024)


@final
@dataclass(frozen=True, slots=True)
class Geometry:
    """A model, as far as its cache is concerned.

    Attributes:
        name: The model.
        token_bytes: Bytes of one token, all layers and ranks.
        shape: Where these come from.
    """

    name: str
    token_bytes: int
    shape: str

    @classmethod
    def of_heads(
        cls, name: str, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int = 2
    ) -> Geometry:
        """Return the geometry of a model with keys and values per head."""
        shape = f"{layers} layers, {kv_heads} KV heads of {head_dim}, {8 * dtype_bytes} bit"
        return cls(name, 2 * layers * kv_heads * head_dim * dtype_bytes, shape)

    @classmethod
    def of_latent(cls, name: str, layers: int, latent: int, dtype_bytes: int = 2) -> Geometry:
        """Return the geometry of a model with one latent vector a token and layer."""
        shape = f"{layers} layers, latent of {latent}, {8 * dtype_bytes} bit"
        return cls(name, layers * latent * dtype_bytes, shape)

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes of a row of the primary tier, which are the payload of an object."""
        return -(-self.token_bytes * block_tokens // _ROW_BYTES) * _ROW_BYTES

    def object_bytes(self, block_tokens: int) -> int:
        """Return the bytes of an object."""
        return self.block_bytes(block_tokens) + TRAILER_BYTES


MODELS: Final = (
    Geometry.of_heads("Qwen2.5-7B", 28, 4, 128),
    Geometry.of_latent("DeepSeek-V3", 61, 576),
    Geometry.of_heads("Llama-3.1-8B", 32, 8, 128),
    Geometry.of_heads("Qwen3-32B", 64, 8, 128),
    Geometry.of_heads("Llama-3.1-70B", 80, 8, 128),
    Geometry.of_heads("Llama-3.1-405B", 126, 8, 128),
)


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """What a million prompt tokens that neither GPU nor CPU memory has cause.

    Attributes:
        geometry: The model.
        block_tokens: Tokens of a block.
        hit_share: Share of the tokens that the store has; the others are computed and stored.
    """

    geometry: Geometry
    block_tokens: int
    hit_share: float

    @property
    def blocks(self) -> float:
        """Blocks of the prompts: each is looked up once."""
        return _TOKENS / self.block_tokens

    @property
    def gets(self) -> float:
        """Blocks loaded."""
        return self.blocks * self.hit_share

    @property
    def puts(self) -> float:
        """Blocks stored."""
        return self.blocks - self.gets

    @property
    def stored_bytes(self) -> float:
        """Bytes added to the store."""
        return self.puts * self.geometry.object_bytes(self.block_tokens)

    @property
    def loaded_bytes(self) -> float:
        """Bytes read from it."""
        return self.gets * self.geometry.object_bytes(self.block_tokens)

    def cost(self, put_price: float, get_price: float, month_price: float) -> float:
        """Return the cost of requests, and of a month of what is stored.

        Args:
            put_price: Of a thousand PUT requests.
            get_price: Of a thousand GET or HEAD requests.
            month_price: Of 10^9 bytes for a month.
        """
        requests = (self.puts * put_price + (self.blocks + self.gets) * get_price) / 1000
        return requests + self.stored_bytes / _GB * month_price


# -- requests, counted ----------------------------------------------------------------------------


@final
class _CountingStore:
    """An object store in memory that counts what it is asked."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._objects: dict[str, bytes] = {}

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def length(self, name: str) -> int:
        """HEAD."""
        self.counts["HEAD"] += 1
        return len(self._found(name))

    async def get(self, name: str, most_bytes: int) -> Buffer:
        """GET."""
        self.counts["GET"] += 1
        return self._found(name)[:most_bytes]

    async def get_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """GET."""
        self.counts["GET"] += 1
        return scatter(self._found(name), parts)

    async def get_range(self, name: str, start: int, end: int) -> Buffer:
        """GET of a range."""
        self.counts["GET, 256 bytes"] += 1
        return self._found(name)[start:end]

    async def put(self, name: str, data: bytes | bytearray) -> None:
        """PUT."""
        self.counts["PUT"] += 1
        self._objects[name] = bytes(data)

    async def put_new(self, name: str, data: bytes | bytearray) -> bool:
        """PUT with a condition."""
        if name in self._objects:
            self.counts["PUT, refused"] += 1
            return False
        await self.put(name, data)
        return True

    async def remove(self, name: str) -> None:
        """DELETE."""
        self.counts["DELETE"] += 1
        self._objects.pop(name, None)

    def _found(self, name: str) -> bytes:
        try:
            return self._objects[name]
        except KeyError:
            raise FileNotFoundError(name) from None


@final
class _CountingTier(ObjectTier):
    store = _CountingStore()

    @override
    def make_store(self) -> ObjectStore:
        return self.store

    @override
    def root(self, store: ObjectStore) -> str:
        return ""


def count_requests(num_blocks: int) -> dict[str, Counter[str]]:
    """Run the tier over a store that counts; return the requests for everything it does."""
    store = _CountingTier.store = _CountingStore()
    config: TierConfig = parse_tier_config("counted", ObjectConfig, {})
    keys = [example_key(number) for number in range(num_blocks)]
    found: dict[str, Counter[str]] = {}
    with TierDriver(_CountingTier, config, num_blocks=num_blocks, block_bytes=4096) as driver:

        def count(what: str, worked: object) -> None:
            if not worked:
                raise RuntimeError(f"{what}: the tier did not do it")
            found[what] = Counter(store.counts)
            store.counts.clear()

        count("open, in a new namespace", driver.tier)
        # For as long as a request lives, the tier remembers what it has told it.
        before, after = ReqContext("before"), ReqContext("after")
        absent = not any(driver.resolve(keys, before))
        count("a lookup of a block that is not there", absent)
        driver.tier.on_request_finished(before)
        count("a store", driver.store(keys).success)
        count("a lookup of a block that is there", all(driver.resolve(keys, after)))
        count("the same lookup again, for the same request", all(driver.resolve(keys, after)))
        count("a load", driver.load(keys).success)
        count("a store of what is there", driver.store(keys).success)
    return found


# -- tables ---------------------------------------------------------------------------------------


def tables(models: Sequence[Geometry], num_blocks: int = 32) -> Iterator[str]:
    """Yield the lines of all tables, as Markdown."""
    yield "| what | requests |"
    yield "|---|---|"
    for what, counts in count_requests(num_blocks).items():
        per = 1 if what.startswith("open") else num_blocks
        shown = " + ".join(f"{count / per:g} {name}" for name, count in sorted(counts.items()))
        yield f"| {what} | {shown or 'none'} |"
    yield ""
    yield (
        "| model | cache of one token | 10^6 tokens | "
        + " | ".join(f"object of {tokens} tokens" for tokens in BLOCK_TOKENS)
        + " |"
    )
    yield "|---|---|---|" + "---|" * len(BLOCK_TOKENS)
    for model in models:
        sizes = " | ".join(_size(model.block_bytes(tokens)) for tokens in BLOCK_TOKENS)
        yield (
            f"| {model.name} ({model.shape}) | {model.token_bytes / _KIB:.1f} KiB | "
            f"{model.token_bytes * _TOKENS / _GB:.0f} GB | {sizes} |"
        )
    yield ""
    yield "| tokens of a block | HEAD | PUT, nothing found | PUT + GET, half found | trailers |"
    yield "|---|---|---|---|---|"
    for tokens in BLOCK_TOKENS:
        cold, half = (Traffic(models[0], tokens, share) for share in (0.0, 0.5))
        trailers = cold.blocks * TRAILER_BYTES / _MIB
        yield (
            f"| {tokens} | {cold.blocks:,.0f} | {cold.puts:,.0f} | {half.puts:,.0f} + "
            f"{half.gets:,.0f} | {trailers:.1f} MiB |"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.4g} MiB" if num_bytes >= _MIB else f"{num_bytes / _KIB:.4g} KiB"


def _prices(models: Sequence[Geometry], options: argparse.Namespace) -> Iterator[str]:
    yield ""
    yield (
        f"| model, {options.hit_share:.0%} found | "
        + " | ".join(f"{tokens} tokens" for tokens in BLOCK_TOKENS)
        + " |"
    )
    yield "|---|" + "---|" * len(BLOCK_TOKENS)
    for model in models:
        costs = " | ".join(
            f"{Traffic(model, tokens, options.hit_share).cost(*_price_list(options)):.4f}"
            for tokens in BLOCK_TOKENS
        )
        yield f"| {model.name} | {costs} |"


def _price_list(options: argparse.Namespace) -> tuple[float, float, float]:
    return options.put_price, options.get_price, options.month_price


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of a model of your own")
    parser.add_argument("--kv-heads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--dtype-bytes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--put-price", type=float, default=0.0, help="of 1,000 PUT requests")
    parser.add_argument("--get-price", type=float, default=0.0, help="of 1,000 GET or HEAD")
    parser.add_argument("--month-price", type=float, default=0.0, help="of a GB for a month")
    parser.add_argument("--hit-share", type=float, default=0.5, help="tokens found in the store")
    parser.add_argument("--quick", action="store_true", help="the same; it takes a second")
    options = parser.parse_args(arguments)
    models: Sequence[Geometry] = MODELS
    if options.layers is not None:
        own = (options.layers, options.kv_heads, options.head_dim, options.dtype_bytes)
        models = (Geometry.of_heads("yours", *own),)
    lines = list(tables(models))
    if any(_price_list(options)):
        lines += _prices(models, options)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
