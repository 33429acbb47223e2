"""Rules for all tests."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from _pytest.reports import TestReport


_ROOT: Final = Path(__file__).parents[1]

# They import vLLM; tests/integration/vllm/test_vllm_env.py runs them where there is one.
collect_ignore = [] if find_spec("vllm") else ["vllm_env"]


def pytest_configure() -> None:
    """Take interrupts, also in the background of a shell, which has its children ignore them.

    Tests send some, to this process and to others, which inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return the Python of the environment that ``make vllm-env`` builds."""
    named = os.environ.get("KV_CORE_VLLM_PYTHON")
    python = Path(named) if named else _ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: run 'make vllm-env', or set KV_CORE_VLLM_PYTHON")
    return python


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, TestReport, TestReport]:
    """With ``CI=true``, a test that is skipped fails: a prerequisite is missing.

    A skip that nobody looks at is a test that nobody runs. Only devices may be missing there,
    and expected failures are none of this.
    """
    report = yield
    expected = hasattr(report, "wasxfail")
    if report.skipped and not expected and _in_ci() and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"{item.nodeid}: {reason}. With CI=true every prerequisite must be there."
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """With ``CI=true``, a module that skips itself fails as well."""
    report = yield
    if report.skipped and _in_ci():
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.nodeid}: {report.longrepr}. With CI=true every prerequisite must be there."
        )
    return report
