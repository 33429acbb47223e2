"""What cannot be replayed: one message that says what to do, status 2, nothing left behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Refusal = Callable[..., str]
    Run = Callable[..., tuple[int, str, str]]

CHAT: Final = ("synthetic:chat", "--limit=5")

# -- tiers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "parts"),
    [
        ("nvme", ["'nvme'", "(installed: example, ", "pip install kv-tier-nvme"]),
        ("exmaple", ["Did you mean 'example'?", "pip install kv-tier-exmaple"]),
        ("fs", ["tier 'fs': 'root_dir' is required but missing"]),
        ("fs:root_dir=x,foo=1", ["tier 'fs': 'foo' is not a setting", "direct_io", "root_dir"]),
        ("fs:root_dir=x,io_threads=many", ["tier 'fs'", "io_threads"]),
        ("fs:root_dir=x,mode=ro", ["mode", "'read_write' or 'read_only'"]),
        ("example:name=cpu", ["must not be 'cpu'"]),
        ("example:name=a/b", ["'a/b'", "letters, digits"]),
        ("fs:root_dir", ["expected TYPE:KEY=VALUE,KEY=VALUE", "part 1"]),
        ("fs:root_dir=", ["part 1", "has no key or no value"]),
        ("", ["expected TYPE:KEY=VALUE", "no type", "kv-core tiers"]),
        (":root_dir=x", ["no type"]),
        ('{"type": "fs"', ["begins like JSON but is not", "line 1"]),
        ('{"root_dir": "x"}', ["type' is missing", "kv-core tiers"]),
    ],
)
def test_tiers_that_cannot_be_opened(tier: str, parts: list[str], refusal: Refusal) -> None:
    """Unknown types, settings that are missing, unknown or invalid, malformed options."""
    message = refusal(*CHAT, f"--tier={tier}")
    for part in parts:
        assert part in message


def test_two_tiers_need_two_names(refusal: Refusal) -> None:
    """The second tier of a type is refused with the way out."""
    assert "give each tier of one type a 'name'" in refusal(*CHAT, *("--tier=example",) * 2)


def test_a_root_that_is_a_file(refusal: Refusal, trace_file: Path) -> None:
    """A file in the place of the root folder is named."""
    message = refusal(*CHAT, f"--tier=fs:root_dir={trace_file}")
    assert f"root_dir {trace_file} is not a directory" in message


# -- traces --------------------------------------------------------------------------------------


def test_a_trace_that_is_not_there(refusal: Refusal, tmp_path: Path) -> None:
    """The path and the reason."""
    message = refusal(str(tmp_path / "absent.jsonl"))
    assert "absent.jsonl: cannot be read (No such file or directory)" in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["trace"]),
        ("hello\n", ["expected"]),
        ('{"a": 1}\n', ["fields: 'a'", "expected a Mooncake"]),
        ("\x00\xff", ["expected"]),
    ],
)
def test_a_file_that_is_no_trace(
    content: str, parts: list[str], refusal: Refusal, tmp_path: Path
) -> None:
    """Whatever a file holds, the message names it and what was expected."""
    path = tmp_path / "other"
    path.write_bytes(content.encode("latin-1"))
    message = refusal(str(path))
    for part in (str(path), *parts):
        assert part in message


def test_a_bad_line_is_numbered(refusal: Refusal, trace_file: Path) -> None:
    """The line of a trace that does not fit is named."""
    bad = {"timestamp": 9, "input_length": "many", "output_length": 1, "hash_ids": [1]}
    with trace_file.open("a") as file:
        file.write(json.dumps(bad))
    message = refusal(str(trace_file))
    assert f"{trace_file}, line 4: found 'input_length'" in message


@pytest.mark.parametrize("kind", ["", "poetry"])
def test_an_unknown_synthetic_workload(kind: str, refusal: Refusal) -> None:
    """The kinds there are."""
    assert "kinds: chat, shared-prefix, rag, mixed" in refusal(f"synthetic:{kind}")


# -- sizes and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--cpu-bytes", "--block-bytes"])
@pytest.mark.parametrize(
    ("size", "part"),
    [
        ("64mib", "did you mean 'MiB'?"),
        ("64M", "did you mean 'MiB' or 'MB'?"),
        ("0", "'0' must be positive"),
        ("-1", "'-1' must be positive"),
        ("-64MiB", "must be positive"),
        ("lots", "is no size"),
        ("", "is no size"),
        ("0.5", "no whole number"),
    ],
)
def test_sizes_that_are_none(option: str, size: str, part: str, refusal: Refusal) -> None:
    """The option, what was found and the units there are."""
    message = refusal(*CHAT, f"{option}={size}")
    assert message.startswith(f"error: {option}: ")
    assert part in message
    assert "expected a whole number of bytes" in message


@pytest.mark.parametrize("size", ["64MiB", "64MB", "64000000", "1.5 GB"])
def test_sizes_that_are_some(size: str, run_replay: Run) -> None:
    """Both kinds of units, and plain bytes."""
    arguments = ["--gpu-blocks=60", "--quiet", f"--block-bytes={size}", "--cpu-bytes=1B"]
    status, _, err = run_replay(*CHAT, *arguments)
    # Read well: it is the primary tier that has no room for even one such block.
    assert status == 2
    assert "'cpu_bytes' is 1, but one offloaded block takes" in err


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--gpu-blocks=1", "'gpu_blocks' must be at least 2, found 1"),
        ("--block-size-factor=0", "'block_size_factor' must be at least 1, found 0"),
        ("--max-seqs=0", "'max_seqs' must be at least 1, found 0"),
        ("--tokens-per-step=-5", "'tokens_per_step' must be at least 1, found -5"),
        ("--policy=fifo", "known are arc, lru"),
        ("--gpu-blocks=99999999999999999999", "Give it fewer or smaller blocks (--gpu-blocks"),
        ("--block-bytes=8388608TiB", "'cpu_bytes'"),
        ("--cpu-bytes=8388607TiB", "of memory that a process can have here"),
    ],
)
def test_numbers_out_of_range(option: str, part: str, refusal: Refusal) -> None:
    """Each names the setting; sizes beyond any machine are no exception."""
    assert part in refusal(*CHAT, option)


@pytest.mark.parametrize("option", ["--limit=0", "--limit=some", "--gpu-blocks=few"])
def test_options_that_are_no_numbers(option: str, run_replay: Run) -> None:
    """What the option parser finds is its usage message, with the same status."""
    status, out, err = run_replay(*CHAT, option)
    assert (status, out) == (2, "")
    assert f"Invalid value for '{option.partition('=')[0]}'" in err
    assert "Traceback" not in err


def test_a_request_larger_than_the_pool(
    refusal: Refusal, run_replay: Run, trace_file: Path
) -> None:
    """The largest request is named, and the pool that the message asks for is enough."""
    message = refusal(str(trace_file), "--gpu-blocks=4")
    assert "the largest request, 'mooncake-3', needs 4 GPU blocks" in message
    assert "--gpu-blocks 5" in message
    assert run_replay(str(trace_file), "--gpu-blocks=5", "--quiet") == (0, "", "")


# -- the surroundings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("absent/report.json", "there is no folder"),
        ("", "it is a folder"),
        ("trace.jsonl/report.json", "there is no folder"),
    ],
)
def test_a_report_that_cannot_be_written(
    target: str, part: str, refusal: Refusal, trace_file: Path
) -> None:
    """Refused before the replay and not after it."""
    message = refusal(str(trace_file), f"--json={trace_file.parent / target}")
    assert message.startswith("error: --json: the report cannot be written to ")
    assert part in message


@pytest.mark.parametrize("name", ["absent", "trace.jsonl"])
def test_a_memory_folder_that_is_none(name: str, refusal: Refusal, trace_file: Path) -> None:
    """The message says what to name instead."""
    message = refusal(str(trace_file), f"--shm-dir={trace_file.parent / name}")
    assert "the region cannot be created at" in message
    assert "(--shm-dir)" in message
