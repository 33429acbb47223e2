"""Identity of a model's weights, for the namespace of its blocks.

Blocks are bytes computed from weights: found by a process with other weights, they are wrong
answers. A name is not enough, because a folder can be overwritten and a branch can move. So the
identity is, in this order: what the user vouches for (``model_id``), a fingerprint of the files
of a local folder, or the name and full commit of a model on a hub.

The fingerprint is cheap on hundreds of gigabytes. It covers names, sizes and samples of every
weight file, and all of the small files that decide how weights are read. A change that keeps the
size of a file and falls between the samples is not seen: whoever edits single tensors in place
sets ``model_id``.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_core.errors import NamespaceError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LOCAL_REVISION", "MODEL_ID_REVISION", "ModelIdentity", "model_identity"]

LOCAL_REVISION: Final = "local"
"""Revision of a local folder, whose fingerprint covers it."""

MODEL_ID_REVISION: Final = "model-id"
"""Revision of a model that is identified by a ``model_id`` alone."""

_WEIGHT_SUFFIXES: Final = frozenset(
    {
        ".bin",
        ".ckpt",
        ".distcp",
        ".gguf",
        ".ggml",
        ".h5",
        ".msgpack",
        ".nemo",
        ".npy",
        ".npz",
        ".onnx",
        ".pdparams",
        ".pt",
        ".pth",
        ".safetensors",
        ".tensors",
    }
)

# Files besides the weights that change what a forward pass computes: read completely.
_CONFIG_NAMES: Final = frozenset(
    {
        "adapter_config.json",
        "config.json",
        "hf_quant_config.json",
        "params.json",
        "quant_config.json",
        "quantize_config.json",
    }
)

_EDGE_BYTES: Final = 64 * 1024
_SAMPLE_BYTES: Final = 4 * 1024
_SAMPLES: Final = 128
_SAMPLED_ABOVE_BYTES: Final = 2 * _EDGE_BYTES + _SAMPLES * _SAMPLE_BYTES
_CONFIG_LIMIT_BYTES: Final = 64 * 1024 * 1024

_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The fields of a :class:`~kv_core.keys.Namespace` that say whose weights made the bytes.

    Attributes:
        model_fingerprint: SHA-256, 64 hex digits.
        revision: Full commit of a hub model, :data:`LOCAL_REVISION`, or, with a ``model_id``,
            the revision that was given beside it or :data:`MODEL_ID_REVISION`.
        model: Name for people.
    """

    model_fingerprint: str
    revision: str
    model: str


def model_identity(
    model: str, *, revision: str | None = None, model_id: str | None = None
) -> ModelIdentity:
    """Identify the weights that a model name stands for.

    Reads at most 640 KiB of each weight file.

    Args:
        model: A local folder or weight file, or the name of a model on a hub.
        revision: Commit of a hub model. Of no consequence for local files.
        model_id: The user's word for the identity: equal ids stand for equal weights, whatever
            the name, the path or the files.

    Raises:
        NamespaceError: The identity is not definite. The message says what to set.
    """
    if model_id is not None:
        if not model_id.strip():
            raise NamespaceError(
                "'model_id' is empty. Set it to a text that changes whenever the weights change, "
                "or leave it out",
                field="model_fingerprint",
            )
        return ModelIdentity(
            _digest("model-id", model_id), revision or MODEL_ID_REVISION, model or model_id
        )
    path = Path(model)
    if model and path.exists():
        return ModelIdentity(
            _fingerprint(path), LOCAL_REVISION, f"local/{path.resolve().name or 'root'}"
        )
    if not _HUB_NAME.fullmatch(model):
        raise NamespaceError(
            f"model {model!r} is neither an existing folder nor the name of a hub model "
            "('name' or 'organisation/name'). Correct the path, or set 'model_id'",
            field="model",
        )
    if revision is None or not _COMMIT.fullmatch(revision):
        found = "no revision" if revision is None else f"the revision {revision!r}"
        raise NamespaceError(
            f"model {model!r} comes with {found}, which can stand for other weights tomorrow. Set "
            "the revision to a full commit (40 hex digits), or 'model_id' to a text that you "
            "change whenever the weights change",
            field="revision",
        )
    return ModelIdentity(_digest("hub", model, revision), revision, model)


def _digest(*parts: str) -> str:
    """Hash texts so that no two lists of texts look the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _fingerprint(model: Path) -> str:
    try:
        files = [(model.name, model)] if model.is_file() else sorted(_walk(model, "", set()))
        parts = ["files"]
        weight_files = 0
        for name, path in files:
            is_weights = path.suffix.lower() in _WEIGHT_SUFFIXES
            if is_weights or _is_config(path):
                parts += [name, *_content(path, complete=not is_weights)]
                weight_files += is_weights
    except OSError as error:
        raise NamespaceError(
            f"the files of model '{model}' cannot be read to identify its weights: {error}. Make "
            "them readable, or set 'model_id'",
            field="model_fingerprint",
        ) from error
    if not weight_files:
        raise NamespaceError(
            f"model '{model}' has no weight files of a known kind "
            f"({', '.join(sorted(_WEIGHT_SUFFIXES))}). Set 'model_id' to a text that you change "
            "whenever the weights change",
            field="model_fingerprint",
        )
    return _digest(*parts)


def _is_config(path: Path) -> bool:
    # Modelling code that ships with the weights decides what they compute, too.
    return path.name in _CONFIG_NAMES or path.name.endswith(".index.json") or path.suffix == ".py"


def _walk(folder: Path, prefix: str, ancestors: set[tuple[int, int]]) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of all files; links are followed, hidden folders skipped."""
    stat = folder.stat()
    identity = (stat.st_dev, stat.st_ino)
    if identity in ancestors:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if not entry.name.startswith("."):
                    yield from _walk(
                        Path(entry.path), f"{prefix}{entry.name}/", ancestors | {identity}
                    )
            else:
                yield prefix + entry.name, Path(entry.path)


def _content(path: Path, *, complete: bool) -> tuple[str, str]:
    """Return the size of a file and a digest of all of it, or of samples of it."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        limit = _CONFIG_LIMIT_BYTES if complete else _SAMPLED_ABOVE_BYTES
        for offset, length in _ranges(size, limit):
            # A short read only means that the file is being written: the digest differs then.
            digest.update(os.pread(descriptor, length, offset))
    finally:
        os.close(descriptor)
    return str(size), digest.hexdigest()


def _ranges(size: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of what is read of a file of ``size`` bytes."""
    if size <= limit:
        yield 0, size
        return
    yield 0, _EDGE_BYTES
    span = size - 2 * _EDGE_BYTES - _SAMPLE_BYTES
    for index in range(_SAMPLES):
        yield _EDGE_BYTES + span * index // (_SAMPLES - 1), _SAMPLE_BYTES
    yield size - _EDGE_BYTES, _EDGE_BYTES
