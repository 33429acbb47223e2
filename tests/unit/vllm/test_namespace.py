"""The namespace of an engine: nothing that decides the bytes of a block is left out."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kv_core.errors import ConfigError, HashSeedError, NamespaceError
from kv_core.vllm._namespace import compute_namespace
from kv_core.vllm._vllm_config import WholeConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_core.keys import Namespace

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass(frozen=True)
class _Page:
    """Stands for one of vLLM's specs of a page."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: str = "torch.bfloat16"
    sliding_window: int | None = None
    page_size_bytes: int = 8192


class _Pages(SimpleNamespace):
    """Stands for the specs of all layers of a group, as workers have them."""


@dataclasses.dataclass
class _Engine:
    """What an engine is started with.

    Attributes:
        config: vLLM's ``OffloadingConfig``.
        vllm: Its ``VllmConfig``.
        kv_cache: Its ``KVCacheConfig``.
        version: Its version.
        device: What it runs on.
    """

    config: Any
    vllm: Any
    kv_cache: Any
    version: str = "0.32.0"
    device: str = "cuda-9.0"

    def namespace(self, *, lasting: bool = True) -> Namespace:
        """Compute it."""
        return compute_namespace(
            self.config,
            WholeConfig(self.vllm, self.kv_cache),
            block_bytes=16384,
            vllm_version=self.version,
            device=self.device,
            lasting=lasting,
        )

    @property
    def fingerprint(self) -> str:
        """What blocks are kept under."""
        return self.namespace().fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> _Engine:
    """Return an engine that serves the model."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    return _Engine(
        config=SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"), group_id=0)],
            worker_kv_bytes_per_block=8192,
            extra_config={},
            engine_id="engine-1",
            model=SimpleNamespace(name=str(model), dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1),
            replicated_layout=False,
            canonical_layout=False,
            kv_cache_layout="LBHNC",
        ),
        vllm=SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(model),
                revision=None,
                hf_config=SimpleNamespace(_commit_hash=None),
                dtype="torch.bfloat16",
                quantization=None,
                hf_overrides={},
                hf_config_path=None,
                seed=0,
                max_model_len=4096,
                original_max_model_len=4096,
                multimodal_config=SimpleNamespace(mm_processor_kwargs=None),
            ),
            load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
            cache_config=SimpleNamespace(
                prefix_caching_hash_algo="sha256", kv_cache_dtype_skip_layers=[]
            ),
            parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
            attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
            speculative_config=None,
            lora_config=None,
        ),
        kv_cache=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=_Page())]),
    )


def _set(*path: str, value: Any) -> Callable[[_Engine], None]:
    def change(engine: _Engine) -> None:
        target: Any = engine
        for name in path[:-1]:
            target = getattr(target, name)
        setattr(target, path[-1], value)

    change.__name__ = ".".join(path)
    return change


def _page(**fields: Any) -> Callable[[_Engine], None]:
    def change(engine: _Engine) -> None:
        engine.kv_cache.kv_cache_groups[0].kv_cache_spec = _Page(**fields)

    change.__name__ = f"page {fields}"
    return change


def _other_weights(engine: _Engine) -> None:
    from pathlib import Path

    (Path(engine.vllm.model_config.model) / "model.safetensors").write_bytes(b"WEIGHTS")


@pytest.mark.parametrize(
    "change",
    [
        _other_weights,
        _set("vllm", "model_config", "dtype", value="torch.float16"),
        _set("vllm", "model_config", "quantization", value="fp8"),
        _set("vllm", "model_config", "hf_overrides", value={"rope_theta": 1e6}),
        _set("vllm", "model_config", "max_model_len", value=131072),
        _set("vllm", "model_config", "multimodal_config", "mm_processor_kwargs", value={"fps": 2}),
        _set("vllm", "model_config", "multimodal_config", "video_pruning_rate", value=0.5),
        _set("vllm", "load_config", "load_format", value="dummy"),
        _set("vllm", "load_config", "model_loader_extra_config", value={"tensorizer_uri": "s3"}),
        _set("vllm", "cache_config", "kv_cache_dtype_skip_layers", value=["0"]),
        _set("vllm", "cache_config", "prefix_caching_hash_algo", value="sha256_cbor"),
        _set("vllm", "parallel_config", "cp_kv_cache_interleave_size", value=2),
        _set("vllm", "attention_config", "backend", value="FLASHINFER"),
        _set("config", "model", "dtype", value="fp8_e4m3"),
        _set("config", "kv_cache_layout", value="LBNHC"),
        _set("config", "worker_kv_bytes_per_block", value=4096),
        _set("config", "replicated_layout", value=True),
        _set("config", "canonical_layout", value=True),
        _set("config", "cache", "tokens_per_hash", value=8),
        _set("config", "cache", "blocks_per_chunk", value=2),
        _set("config", "parallel", "tp_size", value=4),
        _set("config", "parallel", "pp_size", value=2),
        _set("config", "parallel", "pcp_size", value=2),
        _set("config", "parallel", "dcp_size", value=2),
        _set("config", "parallel", "world_size", value=4),
        _set("config", "extra_config", value={"model_id": "mine"}),
        _set("version", value="0.33.1"),
        _set("device", value="cuda-8.0"),
        _page(num_kv_heads=4),
        _page(head_size=128),
        _page(dtype="torch.float8_e4m3fn"),
        _page(sliding_window=128),
        _page(page_size_bytes=16384),
    ],
    ids=lambda change: change.__name__,
)
def test_whatever_changes_bytes_changes_the_namespace(
    engine: _Engine, change: Callable[[_Engine], None]
) -> None:
    """NS-1: no block of the one is found by the other."""
    before = engine.fingerprint
    change(engine)
    assert engine.fingerprint != before


@pytest.mark.parametrize(
    "change",
    [
        _set("config", "engine_id", value="engine-2"),
        _set("version", value="0.32.7"),
        _set("vllm", "model_config", "seed", value=7),
    ],
    ids=lambda change: change.__name__,
)
def test_what_changes_no_bytes_does_not(engine: _Engine, change: Callable[[_Engine], None]) -> None:
    """NS-2: a restart finds its blocks again."""
    before = engine.fingerprint
    change(engine)
    assert engine.fingerprint == before


def test_a_length_that_fits_the_memory_changes_nothing(engine: _Engine) -> None:
    """VLLM lowers it after the model was built, and in each of its processes at another time."""
    engine.vllm.model_config.original_max_model_len = -1
    before = engine.fingerprint
    engine.vllm.model_config.max_model_len = 1024
    assert engine.fingerprint == before


def test_a_copy_of_the_folder_is_the_same_model(engine: _Engine, tmp_path: Path) -> None:
    """The weights count, not the path they lie at."""
    before = engine.fingerprint
    engine.vllm.model_config.model = str((tmp_path / "model").rename(tmp_path / "moved"))
    assert engine.fingerprint == before


def test_scheduler_and_workers_agree(engine: _Engine) -> None:
    """A worker has the pages of all layers of a group, the scheduler that of the first."""
    worker = copy.deepcopy(engine)
    worker.kv_cache.kv_cache_groups[0].kv_cache_spec = _Pages(
        kv_cache_specs={"a": _Page(), "b": _Page()}, page_size_bytes=16384
    )
    assert worker.fingerprint == engine.fingerprint


def test_groups_are_those_that_are_offloaded(engine: _Engine) -> None:
    """A group keeps its own window and size, by vLLM's number of the group."""
    engine.config.groups = [
        SimpleNamespace(tokens_per_block=16, layer_names=("b", "c", "d"), group_id=1)
    ]
    engine.config.cache.blocks_per_chunk = 2
    engine.kv_cache.kv_cache_groups.append(
        SimpleNamespace(kv_cache_spec=_Page(sliding_window=96, page_size_bytes=100))
    )
    [group] = engine.namespace().groups
    assert (group.tokens_per_block, group.bytes_per_block) == (32, 600)
    assert (group.num_layers, group.sliding_window) == (3, 96)


# -- whose weights ------------------------------------------------------------------------------


def test_a_hub_model_is_identified_by_the_commit_that_was_loaded(engine: _Engine) -> None:
    """A branch stands for what it stood for at the start."""
    engine.vllm.model_config.model = "organisation/name"
    engine.vllm.model_config.hf_config._commit_hash = COMMIT
    namespace = engine.namespace()
    assert (namespace.model, namespace.revision) == ("organisation/name", COMMIT)
    engine.vllm.model_config.hf_config._commit_hash = COMMIT[::-1]
    assert engine.fingerprint != namespace.fingerprint


def test_a_full_revision_counts_more(engine: _Engine) -> None:
    """What the user pinned is what was loaded."""
    engine.vllm.model_config.model = "organisation/name"
    engine.vllm.model_config.revision = COMMIT
    engine.vllm.model_config.hf_config._commit_hash = COMMIT[::-1]
    assert engine.namespace().revision == COMMIT


def _hub_without_commit(engine: _Engine) -> None:
    engine.vllm.model_config.model = "organisation/name"


def _no_weights(engine: _Engine) -> None:
    from pathlib import Path

    (Path(engine.vllm.model_config.model) / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "change",
    [
        _hub_without_commit,
        _no_weights,
        _set("vllm", "lora_config", value=SimpleNamespace(max_loras=4)),
        _set("vllm", "model_config", "hf_config_path", value="elsewhere"),
    ],
    ids=lambda change: change.__name__,
)
def test_what_is_not_known_is_refused(engine: _Engine, change: Callable[[_Engine], None]) -> None:
    """The message names ``model_id``, with which the user vouches for it."""
    change(engine)
    with pytest.raises(NamespaceError, match="model_id"):
        engine.namespace()
    engine.config.extra_config = {"model_id": "mine"}
    assert engine.namespace().revision


def test_without_lasting_tiers_the_engine_is_its_own_identity(engine: _Engine) -> None:
    """Nothing else's blocks can be found, so nothing need be known of the model."""
    _no_weights(engine)
    engine.vllm.lora_config = SimpleNamespace(max_loras=4)
    first = engine.namespace(lasting=False).fingerprint
    assert engine.namespace(lasting=False).fingerprint == first
    engine.config.engine_id = "engine-2"
    assert engine.namespace(lasting=False).fingerprint != first


def test_an_unknown_layout_is_refused(engine: _Engine) -> None:
    """No default: another engine's default may be another layout."""
    engine.config.kv_cache_layout = None
    with pytest.raises(NamespaceError, match="kv_cache_layout"):
        engine.namespace()


def test_an_object_of_a_program_is_refused(engine: _Engine) -> None:
    """Its text is another one in every process."""
    engine.vllm.model_config.hf_overrides = lambda config: config
    with pytest.raises(NamespaceError, match="'hf_overrides' is an object of a program"):
        engine.namespace()


def test_a_wrong_model_id_is_named(engine: _Engine) -> None:
    """It must be a text."""
    engine.config.extra_config = {"model_id": ""}
    with pytest.raises(ConfigError, match="'model_id'"):
        engine.namespace()


def test_a_draft_model_counts(engine: _Engine, tmp_path: Path) -> None:
    """The pages of its layers are in the same blocks."""
    without = engine.fingerprint
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"draft")
    engine.vllm.speculative_config = SimpleNamespace(
        method="eagle",
        draft_model_config=SimpleNamespace(
            model=str(draft), revision=None, hf_config=SimpleNamespace(), dtype="torch.bfloat16"
        ),
    )
    first = engine.fingerprint
    (draft / "model.safetensors").write_bytes(b"DRAFT")
    assert len({without, first, engine.fingerprint}) == 3


def test_speculation_without_a_model_changes_nothing(engine: _Engine) -> None:
    """N-grams have no pages."""
    before = engine.fingerprint
    engine.vllm.speculative_config = SimpleNamespace(method="ngram", draft_model_config=None)
    assert engine.fingerprint == before


def test_dummy_weights_are_those_of_their_seed(engine: _Engine) -> None:
    """Random weights are not those of the files beside them."""
    engine.vllm.load_config.load_format = "dummy"
    before = engine.fingerprint
    engine.vllm.model_config.seed = 1
    assert engine.fingerprint != before


# -- which tokens -------------------------------------------------------------------------------


def test_an_unseeded_hash_is_vllms_default(engine: _Engine) -> None:
    """Cryptographic hashes have a fixed seed, so every process finds the blocks."""
    namespace = engine.namespace()
    assert namespace.hash_seed == "vllm-none-hash"
    namespace.require_reproducible_keys(needed_by="a tier")


def test_an_unseeded_xxhash_is_random(engine: _Engine) -> None:
    """Each process draws its own seed: a persistent tier would never hit."""
    engine.vllm.cache_config.prefix_caching_hash_algo = "xxhash"
    namespace = engine.namespace()
    assert namespace.hash_seed is None
    with pytest.raises(HashSeedError, match="PYTHONHASHSEED"):
        namespace.require_reproducible_keys(needed_by="a tier")


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
@pytest.mark.parametrize("seed", ["17", "random", ""])
def test_a_seed_is_what_the_variable_says(
    engine: _Engine, monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str
) -> None:
    """VLLM takes its text as it is, also where Python would draw lots."""
    engine.vllm.cache_config.prefix_caching_hash_algo = algorithm
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    namespace = engine.namespace()
    namespace.require_reproducible_keys(needed_by="a tier")
    monkeypatch.setenv("PYTHONHASHSEED", "18")
    assert engine.fingerprint != namespace.fingerprint


def test_a_pipeline_counts_its_partition(engine: _Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers a rank has decides where in a block they are."""
    engine.config.parallel.pp_size = 2
    before = engine.fingerprint
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert engine.fingerprint != before
