"""The command line as a whole: exit statuses, the error frame, and what gets imported."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

import kv_core
from kv_core.cli import _frame, main
from kv_core.cli._builtin import builtin_names
from kv_core.errors import ConfigError
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PLUGIN = """
import kv_core
import typer
from kv_core.contract import ContractVersion, TierConfig, TierLimits, TierSpec
from kv_core.errors import TierOpenError

@kv_core.hookimpl
def kv_core_register_tier():
    return TierSpec(type="acme", summary="", contract=ContractVersion(1, 0),
        factory=lambda context: None, config_model=TierConfig,
        limits=lambda config: TierLimits(
            job_deadline_s=1.0, lookup_deadline_s=1.0, min_free_bytes=1))

@kv_core.hookimpl
def kv_core_register_commands(app):
    @app.command("acme")
    def acme(how: str):
        if how == "own": raise TierOpenError("the disk is not there")
        if how == "file": open("/no/such/file")
        if how == "interrupt": raise KeyboardInterrupt
        if how == "defect": raise ValueError("a defect")
        if how == "status": raise SystemExit(7)
        if how == "text": raise SystemExit("stopped")
        print("fine")
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierRegistry:
    """Provide a registry with one tier that has a command, and one that is broken."""
    (tmp_path / "kv_cli_test_plugin.py").write_text(_PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kv_cli_test_plugin", raising=False)
    return TierRegistry(
        [
            metadata.EntryPoint("acme", "kv_cli_test_plugin", "kv_core.tiers"),
            metadata.EntryPoint("broken", "kv_cli_no_such_module", "kv_core.tiers"),
        ]
    )


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """--version names the package and the contract, and imports no tier."""
    assert main(["--version"], registry=TierRegistry(())) == 0
    assert capsys.readouterr().out == f"kv-core {kv_core.__version__}, tier contract 1.0\n"


def test_the_command_of_a_tier_runs(
    registry: TierRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is not built in brings the plugins in; a broken one is one warning."""
    assert main(["acme", "x"], registry=registry) == 0
    captured = capsys.readouterr()
    assert captured.out == "fine\n"
    assert captured.err.startswith("warning: tier plugin 'broken'")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["tiers", "--json"], ["--version"]])
def test_built_in_commands_load_no_commands_of_tiers(
    arguments: list[str], registry: TierRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken or slow plugin cannot get in the way of a built-in command."""

    def refuse(_self: TierRegistry, _app: object) -> None:
        raise AssertionError

    monkeypatch.setattr(TierRegistry, "command_plugins", refuse)
    assert main(arguments, registry=registry) == 0


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_commands_of_tiers(
    arguments: list[str], registry: TierRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever looks for commands sees all of them."""
    main(arguments, registry=registry)
    captured = capsys.readouterr()
    listing = captured.out + captured.err
    for name in (*builtin_names(), "acme"):
        assert name in listing


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("own", 2, "error: the disk is not there [KVC502]\n"),
        ("file", 2, "error: [Errno 2] No such file or directory: '/no/such/file'\n"),
        ("status", 7, ""),
        ("text", 1, "stopped\n"),
    ],
)
def test_explained_problems_are_one_message(
    how: str,
    status: int,
    message: str,
    registry: TierRegistry,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback for errors of kv-core and of the operating system; status 2."""
    assert main(["acme", how], registry=registry) == status
    (_warning, _, rest) = capsys.readouterr().err.partition("\n")
    assert rest == message


def test_an_interrupt_has_the_status_of_shells(registry: TierRegistry) -> None:
    """Ctrl-C is 128 + SIGINT."""
    assert main(["acme", "interrupt"], registry=registry) == 130


def test_a_defect_keeps_its_traceback(registry: TierRegistry) -> None:
    """An unexpected exception is not dressed up."""
    with pytest.raises(ValueError, match="a defect"):
        main(["acme", "defect"], registry=registry)


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and the name."""
    assert main(["no-such-command"], registry=TierRegistry(())) == 2
    assert "no-such-command" in capsys.readouterr().err


def _raise(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_the_frame_names_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    """The code leads to the page of the error."""
    error = ConfigError("'root' is missing", setting="fs.root")
    assert _frame.run_framed(_raise(error)) == _frame.EXIT_PROBLEM
    assert capsys.readouterr().err == "error: 'root' is missing [KVC101]\n"


def test_the_frame_knows_an_interrupt() -> None:
    """An interrupt outside of a command has the same status."""
    assert _frame.run_framed(_raise(KeyboardInterrupt())) == _frame.EXIT_INTERRUPTED


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_python_m_is_the_command() -> None:
    """``python -m kv_core`` does the same."""
    done = _python("-m", "kv_core", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"kv-core {kv_core.__version__}")


def test_a_closed_pipe_is_quiet() -> None:
    """``kv-core ... | head`` neither complains nor pretends success."""
    code = (
        "import os, sys\n"
        "from kv_core.cli._frame import run_framed\n"
        "reader, writer = os.pipe()\n"
        "os.dup2(writer, 1)\n"
        "os.close(reader)\n"
        "sys.exit(run_framed(lambda: print('lost')))\n"
    )
    done = _python("-c", code)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_help_of_a_built_in_command_imports_nothing_heavy() -> None:
    """Looking at the options of a command does not load the engine or torch."""
    code = (
        "import sys\n"
        "from kv_core.cli import main\n"
        "status = main(['tiers', '--help'])\n"
        "heavy = {'torch', 'kv_core.tiering', 'kv_core.workload', 'kv_core.device'}\n"
        "loaded = sorted(heavy & set(sys.modules))\n"
        "sys.exit(f'loaded {loaded}' if loaded else status)\n"
    )
    done = _python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
