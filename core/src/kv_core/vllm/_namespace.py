"""The namespace of an engine's blocks, from vLLM's configuration.

Everything that decides which bytes a block holds goes in, and what is not known is refused by name:
a namespace that leaves something out serves one model's bytes to another one day. What goes in is
of three kinds. *Whose weights*: the model, its revision or the content of its folder, and what
vLLM does to the weights when it loads them. *Which bytes of a page*: data type, layout, groups and
sizes, parallel sizes, and vLLM's minor version, for how a page is laid out inside is vLLM's own
affair. *Which tokens*: how blocks are hashed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from typing import TYPE_CHECKING, Any, Final

from kv_core.errors import ConfigError, NamespaceError
from kv_core.keys import ALL_RANKS, GroupGeometry, Namespace
from kv_core.model_identity import model_identity
from kv_core.vllm._vllm_config import find_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_core.model_identity import ModelIdentity
    from kv_core.vllm._vllm_config import WholeConfig

__all__ = ["MODEL_ID_SETTING", "compute_namespace", "namespace_of"]

_LOGGER: Final = logging.getLogger(__name__)

MODEL_ID_SETTING: Final = "model_id"
"""Key of ``kv_connector_extra_config``: the user's word for the identity of all weights."""

# vLLM's DEFAULT_NONE_HASH_SEED: the seed of hashes that nobody seeds.
_DEFAULT_SEED: Final = "vllm-none-hash"
_HASH_SEED_VARIABLE: Final = "PYTHONHASHSEED"

# Algorithms that vLLM seeds at random, for their collisions could be searched.
_RANDOM_WHEN_UNSEEDED: Final = "xxhash"

# What vLLM can be told to do to a model between its files and its pages.
_MODEL_FACTS: Final = (
    "dtype",
    "quantization",
    "quantization_config",
    "hf_overrides",
    "model_class_overrides",
    "disable_sliding_window",
    "config_format",
    "code_revision",
    "model_impl",
)
_LOAD_FACTS: Final = ("load_format", "model_loader_extra_config")
# What becomes of images, sound and films is not all in the hashes of their blocks.
_MULTIMODAL_FACTS: Final = (
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
_CACHE_FACTS: Final = (
    "kv_cache_dtype_skip_layers",
    "kv_sharing_fast_prefill",
    "mamba_cache_mode",
)

_LAYER_PARTITION: Final = "VLLM_PP_LAYER_PARTITION"

# How Python shows an object that has no text of its own: differently in each process.
_ADDRESS: Final = re.compile(r"\bat 0x[0-9a-f]+")

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")

# A ``max_model_len`` that vLLM replaces by what fits the GPU's memory.
_FITS_MEMORY: Final = -1


def namespace_of(config: Any, *, block_bytes: int, lasting: bool) -> Namespace:
    """Return the namespace of the engine on whose behalf the caller was called.

    For the arguments and errors see :func:`compute_namespace`.
    """
    # Not at the top: the computation needs no vLLM, and neither do its tests.
    from kv_core.vllm import _compat

    namespace = compute_namespace(
        config,
        find_config(),
        block_bytes=block_bytes,
        vllm_version=_compat.vllm_version(),
        device=_compat.device(),
        lasting=lasting,
    )
    # For whoever compares two engines of which one does not find what the other has stored.
    _LOGGER.info("namespace %s: %s", namespace.fingerprint[:12], json.dumps(namespace.describe()))
    return namespace


def compute_namespace(
    config: Any,
    whole: WholeConfig,
    *,
    block_bytes: int,
    vllm_version: str,
    device: str,
    lasting: bool,
) -> Namespace:
    """Compute the namespace. Reads up to 640 KiB of each weight file of a local model.

    Every process of an engine gets the same, its scheduler and its workers.

    Args:
        config: The ``OffloadingConfig``, as vLLM hands it to a spec.
        whole: What the connector was constructed with.
        block_bytes: Payload bytes of one offloaded block, all ranks together.
        vllm_version: Version of vLLM.
        device: What the engine runs on, as far as it decides how attention lays out a page.
        lasting: Whether any tier keeps blocks beyond this engine, or shares them with others. If
            not, no other weights can get in between, and the engine's own id identifies them.

    Raises:
        NamespaceError: Something is not known. The message names it and says what to set.
        ConfigError: ``model_id`` is no text.
    """
    model_id = _model_id(config.extra_config)
    if lasting:
        identity = _identify_all(whole.vllm, model_id)
    else:
        name = model_id or whole.vllm.model_config.model
        identity = model_identity(name, model_id=f"engine {config.engine_id}")
    cache, parallel = config.cache, config.parallel
    minor_version = ".".join(vllm_version.split(".")[:2])
    return Namespace(
        model=identity.model,
        model_fingerprint=identity.model_fingerprint,
        revision=identity.revision,
        dtype=config.model.dtype,
        kv_layout=f"vllm-{minor_version}/{device}/{_layout(config, whole)}",
        groups=_groups(config, whole.kv_cache),
        block_bytes=block_bytes,
        tokens_per_hash=cache.tokens_per_hash,
        block_size_factor=cache.blocks_per_chunk,
        tensor_parallel_size=parallel.tp_size,
        pipeline_parallel_size=parallel.pp_size,
        prefill_context_parallel_size=parallel.pcp_size,
        decode_context_parallel_size=parallel.dcp_size,
        rank=ALL_RANKS,
        hash_algorithm=whole.vllm.cache_config.prefix_caching_hash_algo,
        hash_seed=_hash_seed(whole.vllm.cache_config.prefix_caching_hash_algo),
    )


def _model_id(extra_config: Mapping[str, Any]) -> str | None:
    model_id = extra_config.get(MODEL_ID_SETTING)
    if model_id is None or (isinstance(model_id, str) and model_id.strip()):
        return model_id
    raise ConfigError(
        f"{MODEL_ID_SETTING!r} must be a text that changes whenever the weights change, found "
        f"{model_id!r}",
        setting=MODEL_ID_SETTING,
    )


# -- whose weights ------------------------------------------------------------------------------


def _identify_all(vllm_config: Any, model_id: str | None) -> ModelIdentity:
    """Identify the weights of the model, of its draft, and what is done to them."""
    model = vllm_config.model_config
    identity = _identify(model, model_id)
    facts = {
        **_facts(model, _MODEL_FACTS, "model"),
        "model.max_model_len": _longest(model),
        **_facts(getattr(model, "multimodal_config", None), _MULTIMODAL_FACTS, "multimodal"),
        **_facts(vllm_config.load_config, _LOAD_FACTS, "load"),
        **_facts(vllm_config.cache_config, _CACHE_FACTS, "cache"),
    }
    if str(vllm_config.load_config.load_format) == "dummy":
        facts["model.seed"] = str(model.seed)
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None:
        facts["draft.method"] = str(vllm_config.speculative_config.method)
        if model_id is None and draft.model != model.model:
            # The pages of its layers are in the same blocks.
            facts["draft.fingerprint"] = _identify(draft, None).model_fingerprint
        facts.update(_facts(draft, _MODEL_FACTS, "draft"))
    if model_id is None:
        _require_nothing_hidden(vllm_config)
    return type(identity)(
        _digest({"identity": identity.model_fingerprint, **facts}),
        identity.revision,
        identity.model,
    )


def _identify(model: Any, model_id: str | None) -> ModelIdentity:
    revision = model.revision
    if model_id is None and (revision is None or not _COMMIT.fullmatch(revision)):
        # A branch or nothing; what it stood for at the start is what was loaded.
        revision = getattr(model.hf_config, "_commit_hash", None) or revision
    return model_identity(model.model, revision=revision, model_id=model_id)


def _longest(model: Any) -> str:
    """Return how long a request may be, as it was when the model was built.

    Some models compute otherwise if they are to serve long requests, short ones included: Phi-3
    takes other rotary factors, Llama 4 another temperature.
    """
    if getattr(model, "original_max_model_len", None) == _FITS_MEMORY:
        # Lowered after the model was built, to what memory there is: the model's own is meant.
        return "the model's own"
    return _text(getattr(model, "max_model_len", None))


def _require_nothing_hidden(vllm_config: Any) -> None:
    """Refuse what vLLM loads from places that the model's identity does not cover."""
    if vllm_config.lora_config is not None:
        raise NamespaceError(
            "LoRA adapters are enabled, and vLLM tells their blocks apart by the names of the "
            "adapters only, which may stand for other adapters elsewhere or tomorrow. "
            f"{_set_model_id('or what a name of an adapter stands for')}",
            field="model_fingerprint",
        )
    if vllm_config.model_config.hf_config_path:
        raise NamespaceError(
            "the model's configuration comes from elsewhere than its weights ('hf_config_path'), "
            f"and nothing identifies it. {_set_model_id('or that configuration')}",
            field="model_fingerprint",
        )


def _set_model_id(also: str) -> str:
    return (
        f"Set {MODEL_ID_SETTING!r} in 'kv_connector_extra_config' to a text that you change "
        f"whenever the weights change {also}"
    )


def _facts(source: Any, names: tuple[str, ...], prefix: str) -> dict[str, str]:
    """Return attributes as text, those that this version of vLLM has."""
    facts = {}
    for name in names:
        text = _text(getattr(source, name, None))
        if _ADDRESS.search(text):
            raise NamespaceError(
                f"vLLM's setting {name!r} is an object of a program ({type(source).__name__}), "
                "which another process cannot compare with its own. Give it as plain data",
                field="model_fingerprint",
            )
        facts[f"{prefix}.{name}"] = text
    return facts


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# -- which bytes of a page ----------------------------------------------------------------------


def _groups(config: Any, kv_cache_config: Any) -> tuple[GroupGeometry, ...]:
    """Return the shape of the blocks of each group that is offloaded."""
    factor = config.cache.blocks_per_chunk
    geometries = []
    for group, spec in zip(config.groups, _group_specs(config, kv_cache_config), strict=True):
        window = getattr(spec, "sliding_window", None)
        geometries.append(
            GroupGeometry(
                tokens_per_block=group.tokens_per_block * factor,
                bytes_per_block=spec.page_size_bytes * len(group.layer_names) * factor,
                num_layers=len(group.layer_names),
                sliding_window=window or None,
            )
        )
    return tuple(geometries)


def _group_specs(config: Any, kv_cache_config: Any) -> list[Any]:
    """Return what one page of each offloaded group is.

    A worker has the specs of all layers of a group, the scheduler that of the first one; the first
    one is all that both agree on.
    """
    specs = []
    for index, group in enumerate(config.groups):
        spec = kv_cache_config.kv_cache_groups[getattr(group, "group_id", index)].kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", None)
        specs.append(next(iter(by_layer.values())) if by_layer else spec)
    return specs


def _layout(config: Any, whole: WholeConfig) -> str:
    """Return the name of the order of a page's dimensions, and a digest of all its facts."""
    name = config.kv_cache_layout
    if name is None:
        raise NamespaceError(
            "vLLM has not said in which order its KV cache has its dimensions "
            "('kv_cache_layout'). Blocks of different orders must never mix, so this version of "
            "vLLM, or this platform, cannot be used",
            field="kv_layout",
        )
    vllm_config = whole.vllm
    parallel = vllm_config.parallel_config
    attention = getattr(vllm_config, "attention_config", None)
    facts = {
        "specs": [_spec_facts(spec) for spec in _group_specs(config, whole.kv_cache)],
        "worker_bytes": config.worker_kv_bytes_per_block,
        "world_size": config.parallel.world_size,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "backend": str(getattr(attention, "backend", None)),
        "backend_per_kind": _text(getattr(attention, "backend_per_kind", None)),
        "context_parallel_interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
    }
    if config.parallel.pp_size > 1:
        facts["layer_partition"] = os.environ.get(_LAYER_PARTITION)
    digest = _digest({fact: _text(value) for fact, value in facts.items()})
    return f"{name}/{digest[:16]}"


def _spec_facts(spec: Any) -> dict[str, str]:
    """Return every field of a spec as text: sizes, heads, data types, windows, padding."""
    fields = getattr(spec, "__dataclass_fields__", {})
    return {
        "kind": type(spec).__name__,
        "page_size_bytes": str(spec.page_size_bytes),
        **{name: str(getattr(spec, name)) for name in fields},
    }


# -- which tokens -------------------------------------------------------------------------------


def _hash_seed(algorithm: str) -> str | None:
    """Return what vLLM seeds its block hashes with, or ``None`` where each process draws its own.

    vLLM takes the text of Python's variable as it is, also where Python takes it for "at random".
    """
    seed = os.environ.get(_HASH_SEED_VARIABLE)
    if seed is None:
        return None if algorithm.startswith(_RANDOM_WHEN_UNSEEDED) else _DEFAULT_SEED
    return f"text {seed!r}" if seed in {"", "random"} else seed
