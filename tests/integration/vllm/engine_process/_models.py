"""Small models with real random weights, whose outputs depend on every byte of their KV cache.

A model of zeros or of vLLM's dummy weights answers the same whatever its cache holds, so that
"the same tokens with and without the cache" would prove nothing. With embeddings of unit variance
and linear layers of variance ``4 / fan_in`` attention is sharp enough that one lost block changes
the tokens, which the module's own sensitivity test shows before anything else is believed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["MODELS", "ModelShape", "build_model"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama-like model.

    Attributes:
        hidden: Width of the residual stream.
        layers: Number of layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate: Width of the feed-forward layers.
        vocabulary: Number of tokens.
        sliding_window: Tokens that a sliding layer sees; ``None`` when every layer sees all.
        sliding_layers: Which layers slide; the others see all.
        seed: What the weights are drawn from.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int = 512
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    seed: int = 20260


_TINY: Final = ModelShape(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=128)

MODELS: Final[dict[str, ModelShape]] = {
    "tiny": _TINY,
    # Alike in everything but the weights.
    "twin": replace(_TINY, seed=20261),
    "sliding": replace(_TINY, sliding_window=96, sliding_layers=(0, 1, 2, 3)),
    "hybrid": replace(_TINY, sliding_window=96, sliding_layers=(0, 2)),
    # 117 million weights: large enough that a step costs what it does in production, in kind.
    "large": ModelShape(
        hidden=1024, layers=10, heads=16, kv_heads=8, head_dim=64, intermediate=2816
    ),
}

_POSITIONS: Final = 4096


def build_model(folder: Path, kind: str) -> Path:
    """Return the folder of a model, made when it is not there yet.

    Several processes may do so at once: the folder appears whole.

    Args:
        folder: Where models are kept.
        kind: One of :data:`MODELS`.

    Returns:
        The model's folder, with ``config.json`` and ``model.safetensors``.
    """
    model = folder / kind
    if model.is_dir():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=folder))
    try:
        shape = MODELS[kind]
        (draft / "config.json").write_text(json.dumps(_config(shape), indent=2))
        _write_safetensors(draft / "model.safetensors", _weights(shape))
        try:
            draft.rename(model)
        except OSError:
            if not model.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return model


def _config(shape: ModelShape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if shape.sliding_window is not None:
        config["sliding_window"] = shape.sliding_window
        config["layer_types"] = [
            "sliding_attention" if layer in shape.sliding_layers else "full_attention"
            for layer in range(shape.layers)
        ]
    return config


def _weights(shape: ModelShape) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(shape.seed)

    def normal(rows: int, columns: int, scale: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    def linear(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return normal(rows, columns, 2.0 / columns**0.5)

    ones = np.ones(shape.hidden, dtype=np.float32)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden, 1.0),
        "lm_head.weight": linear(shape.vocabulary, shape.hidden),
        "model.norm.weight": ones,
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": linear(queries, shape.hidden),
            prefix + "self_attn.k_proj.weight": linear(keys, shape.hidden),
            prefix + "self_attn.v_proj.weight": linear(keys, shape.hidden),
            prefix + "self_attn.o_proj.weight": linear(shape.hidden, queries),
            prefix + "mlp.gate_proj.weight": linear(shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj.weight": linear(shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj.weight": linear(shape.hidden, shape.intermediate),
            prefix + "input_layernorm.weight": ones,
            prefix + "post_attention_layernorm.weight": ones,
        }
    return weights


def _write_safetensors(
    path: Path, tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]]
) -> None:
    """Write float32 tensors: the length of the header, the header, the bytes one after another."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
        file.flush()
        os.fsync(file.fileno())
