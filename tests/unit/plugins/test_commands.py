"""Commands of plugins: all of a plugin's or none, and one plugin's trouble is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from typer.testing import CliRunner

if TYPE_CHECKING:
    from tests.unit.plugins.conftest import FakeSite

_COMMAND = """
import typer

@kv_core.hookimpl
def kv_core_register_commands(app):
    group = typer.Typer()

    @group.command()
    def stat(): print("{answer}")

    @group.command()
    def other(): ...

    app.add_typer(group, name="{name}")
"""


def _app() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def built_in() -> None:
        """Do nothing."""

    return app


def test_commands_of_a_tier_become_commands(site: FakeSite) -> None:
    """A group added by a plugin runs."""
    site.add("acme", also=_COMMAND.format(name="acme", answer="42 blocks"))
    app = _app()
    assert site.registry().command_plugins(app) == []
    result = CliRunner().invoke(app, ["acme", "stat"])
    assert (result.exit_code, result.output) == (0, "42 blocks\n")


def test_a_broken_plugin_is_reported_and_the_others_work(site: FakeSite) -> None:
    """Problems are returned, never raised."""
    site.add("acme", also=_COMMAND.format(name="acme", answer="fine"))
    site.add("broken", "raise SystemExit")
    app = _app()
    problems = site.registry().command_plugins(app)
    assert [problem.code for problem in problems] == ["KVC203"]
    assert CliRunner().invoke(app, ["acme", "stat"]).output == "fine\n"


def test_a_hook_that_fails_half_way_adds_nothing(site: FakeSite) -> None:
    """What a failing hook added before it failed is dropped."""
    site.add("acme", also=_COMMAND.format(name="acme", answer="") + "    raise SystemExit(1)\n")
    app = _app()
    (problem,) = site.registry().command_plugins(app)
    assert "kv_core_register_commands" in str(problem)
    assert app.registered_groups == []


def test_a_name_that_is_taken_is_refused(site: FakeSite) -> None:
    """A plugin can replace neither a built-in command nor one of another plugin."""
    site.add("acme", also=_COMMAND.format(name="built-in", answer=""))
    site.add("beta", also=_COMMAND.format(name="same", answer="beta"))
    site.add("gamma", also=_COMMAND.format(name="same", answer="gamma"))
    app = _app()
    first, second = map(str, site.registry().command_plugins(app))
    assert "'acme'" in first
    assert "'built-in', which is taken" in first
    assert "'gamma'" in second
    assert CliRunner().invoke(app, ["same", "stat"]).output == "beta\n"


def test_a_tier_without_commands_adds_none(site: FakeSite) -> None:
    """The hook is optional."""
    site.add("acme")
    app = _app()
    assert site.registry().command_plugins(app) == []
    assert len(app.registered_commands) == 1


def test_a_contested_type_is_reported_once(site: FakeSite) -> None:
    """Two packages with one type are one problem."""
    site.add("acme", distribution="one")
    site.add("acme", distribution="two")
    assert [p.code for p in site.registry().command_plugins(_app())] == ["KVC202"]
