"""model_identity: other weights, another identity; and cheap on hundreds of gigabytes."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest

from kv_core.errors import NamespaceError
from kv_core.model_identity import LOCAL_REVISION, model_identity

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MIB = 1024 * 1024


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Provide a folder with a small model."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "model-1.safetensors").write_bytes(b"a" * 5000)
    (folder / "model-2.safetensors").write_bytes(b"b" * 5000)
    return folder


def _fingerprint(folder: Path) -> str:
    return model_identity(str(folder)).model_fingerprint


def test_a_folder_is_identified_by_its_content(model: Path, tmp_path: Path) -> None:
    """A copy in another place has the same fingerprint; the name is for people."""
    identity = model_identity(str(model))
    assert (identity.revision, identity.model) == (LOCAL_REVISION, "local/toy")
    assert len(bytes.fromhex(identity.model_fingerprint)) == 32
    moved = model.rename(tmp_path / "renamed")
    assert _fingerprint(moved) == identity.model_fingerprint
    assert model_identity(str(moved)).model == "local/renamed"


def test_other_weights_at_the_same_path(model: Path) -> None:
    """Weights of the same size in the same file are noticed (vllm#49261)."""
    before = _fingerprint(model)
    (model / "model-1.safetensors").write_bytes(b"a" * 4999 + b"x")
    assert _fingerprint(model) != before


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "modeling_toy.py", "quantize_config.json"],
)
def test_small_files_that_decide_the_forward_pass_count(model: Path, name: str) -> None:
    """Configuration, index and modelling code are part of the identity."""
    before = _fingerprint(model)
    (model / name).write_text("changed")
    assert _fingerprint(model) != before


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "generation_config.json"])
def test_files_that_do_not_change_the_bytes_do_not_count(model: Path, name: str) -> None:
    """Keys are made of token ids: the tokenizer and the texts are none of our business."""
    before = _fingerprint(model)
    (model / name).write_text("changed")
    assert _fingerprint(model) == before


def test_a_renamed_weight_file_is_another_model(model: Path) -> None:
    """Names count: they say which weights are loaded where."""
    before = _fingerprint(model)
    (model / "model-1.safetensors").rename(model / "model-3.safetensors")
    assert _fingerprint(model) != before


def test_swapped_weight_files_are_another_model(model: Path) -> None:
    """The same contents under exchanged names are noticed."""
    before = _fingerprint(model)
    (model / "model-1.safetensors").write_bytes(b"b" * 5000)
    (model / "model-2.safetensors").write_bytes(b"a" * 5000)
    assert _fingerprint(model) != before


@pytest.mark.parametrize("suffix", ["bin", "distcp", "gguf", "npy", "pth", "SAFETENSORS"])
def test_every_kind_of_weight_file_counts(model: Path, suffix: str) -> None:
    """An added weight file of any known kind changes the identity."""
    before = _fingerprint(model)
    (model / f"extra.{suffix}").write_bytes(b"x")
    assert _fingerprint(model) != before


@pytest.mark.parametrize("offset", [0, 64 * 1024, 4 * MIB - 1])
def test_a_change_within_a_sample_of_a_large_file_is_seen(model: Path, offset: int) -> None:
    """Head, first sample and tail of a file that is not read completely."""
    large = model / "model-1.safetensors"
    large.write_bytes(bytes(4 * MIB))
    before = _fingerprint(model)
    with large.open("r+b") as file:
        file.seek(offset)
        file.write(b"x")
    assert _fingerprint(model) != before


def test_a_rewrite_of_any_kilobytes_in_a_row_is_seen(model: Path) -> None:
    """No gap between samples is longer than the size by the number of samples."""
    large = model / "model-1.safetensors"
    large.write_bytes(bytes(4 * MIB))
    before = _fingerprint(model)
    for start in range(0, 4 * MIB, 509 * 1024):
        data = bytearray(4 * MIB)
        data[start : start + 33 * 1024] = b"x" * len(data[start : start + 33 * 1024])
        large.write_bytes(data)
        assert _fingerprint(model) != before


def test_hundreds_of_gigabytes_are_cheap(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of 200 GB less than a megabyte is read, its size and its end count."""
    huge = model / "huge.safetensors"
    with huge.open("wb") as file:
        file.truncate(200 * 10**9)
    read: list[int] = []
    original = os.pread

    def counting(descriptor: int, length: int, offset: int) -> bytes:
        data = original(descriptor, length, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counting)
    before = _fingerprint(model)
    assert 600 * 1024 < sum(read) < MIB
    assert len(read) < 200
    os.truncate(huge, 200 * 10**9 + 1)
    assert _fingerprint(model) != before


def test_links_are_followed_and_loops_end(model: Path, tmp_path: Path) -> None:
    """A cache of linked files is the files; a folder that links to its parent ends."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert _fingerprint(linked) == _fingerprint(model)
    (linked / "loop").symlink_to(linked)
    assert _fingerprint(linked) == _fingerprint(model)


def test_subfolders_count_and_hidden_ones_do_not(model: Path) -> None:
    """Weights in a subfolder are weights; a download cache is not."""
    before = _fingerprint(model)
    (model / ".cache").mkdir()
    (model / ".cache" / "old.safetensors").write_bytes(b"x")
    assert _fingerprint(model) == before
    (model / "expert").mkdir()
    (model / "expert" / "new.safetensors").write_bytes(b"x")
    assert _fingerprint(model) != before


def test_a_single_weight_file_is_a_model(tmp_path: Path) -> None:
    """A GGUF file is given by its path."""
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"x" * 100)
    before = model_identity(str(file))
    assert before.model == "local/toy.gguf"
    file.write_bytes(b"y" * 100)
    assert _fingerprint(file) != before.model_fingerprint


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Nothing that identifies the weights: say what to set."""
    with pytest.raises(NamespaceError, match="Set 'model_id'") as caught:
        model_identity(str(tmp_path))
    assert caught.value.field == "model_fingerprint"


def test_a_weight_file_that_cannot_be_read_is_refused(model: Path) -> None:
    """A dangling link is an error, not a smaller model."""
    (model / "model-3.safetensors").symlink_to(model / "gone")
    with pytest.raises(NamespaceError, match="cannot be read") as caught:
        _fingerprint(model)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_model_id_wins_over_everything(model: Path) -> None:
    """Equal ids are equal weights, whatever the files and names."""
    by_folder = model_identity(str(model), model_id="toy-v7")
    by_name = model_identity("org/toy", model_id="toy-v7")
    assert by_folder.model_fingerprint == by_name.model_fingerprint
    assert by_folder.revision == by_name.revision == "model-id"
    assert (
        model_identity("org/toy", model_id="toy-v8").model_fingerprint != by_name.model_fingerprint
    )


def test_a_revision_beside_a_model_id_counts() -> None:
    """A changed revision changes the namespace, also with a model id (vllm#49261)."""
    identity = model_identity("org/toy", model_id="toy", revision="v2")
    assert identity.revision == "v2"


@pytest.mark.parametrize("model_id", ["", "  "])
def test_an_empty_model_id_is_refused(model_id: str) -> None:
    """An empty id identifies nothing."""
    with pytest.raises(NamespaceError, match="'model_id' is empty"):
        model_identity("org/toy", model_id=model_id)


def test_a_hub_model_is_its_name_and_commit() -> None:
    """Name and commit both count (vllm#49261)."""
    identity = model_identity("org/toy", revision=COMMIT)
    assert (identity.revision, identity.model) == (COMMIT, "org/toy")
    others = [
        model_identity("org/toy2", revision=COMMIT),
        model_identity("org/toy", revision=COMMIT[::-1]),
        model_identity("toy", revision=COMMIT),
    ]
    assert len({identity.model_fingerprint, *(o.model_fingerprint for o in others)}) == 4


@pytest.mark.parametrize("revision", [None, "", "main", "v1.0", COMMIT[:12]])
def test_a_hub_model_without_a_commit_is_refused(revision: str | None) -> None:
    """A branch or tag can move: the message says what to set (vllm#49261)."""
    with pytest.raises(NamespaceError, match="full commit") as caught:
        model_identity("org/toy", revision=revision)
    assert caught.value.field == "revision"
    assert "model_id" in str(caught.value)


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./toy", "a/b/c", "../x"])
def test_what_is_neither_folder_nor_hub_name_is_refused(name: str) -> None:
    """A mistyped path is not taken for a hub name."""
    with pytest.raises(NamespaceError) as caught:
        model_identity(name, revision=COMMIT)
    assert caught.value.field == "model"


def test_an_identity_is_frozen() -> None:
    """The value cannot be changed."""
    identity = model_identity("org/toy", revision=COMMIT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        identity.model = "x"  # type: ignore[misc]  # the point of the test
