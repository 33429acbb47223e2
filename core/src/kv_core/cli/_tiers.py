"""``kv-core tiers``: what is installed, what it promises and how it is configured."""

from __future__ import annotations

import json
import types
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from kv_core.contract import CONTRACT_VERSION
from kv_core.errors import KVCoreError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.console import Console

    from kv_core.contract import TierSpec
    from kv_core.plugins import InstalledTier, TierRegistry

__all__ = ["tiers"]


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    type: str
    required: bool
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the listing; also the form of ``--json``."""

    type: str
    distribution: str
    version: str
    contract: str | None
    capabilities: tuple[str, ...]
    summary: str
    settings: tuple[_Setting, ...]
    error: dict[str, str] | None


def tiers(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the installed tiers, what they promise and their settings."""
    registry: TierRegistry = context.obj
    rows = [_row(registry, installed) for installed in registry.installed()]
    if as_json:
        listing = {"contract": str(CONTRACT_VERSION), "tiers": [asdict(row) for row in rows]}
        typer.echo(json.dumps(listing, indent=2))
        return
    if not rows:
        typer.echo("No tier is installed. For local disks: pip install kv-tier-fs")
        return
    from rich.console import Console

    console = Console(highlight=False)
    _print_tables(console, rows)


def _row(registry: TierRegistry, installed: InstalledTier) -> _Row:
    origin = (installed.type, installed.distribution, installed.version)
    try:
        spec = registry.spec(installed.type)
    except KVCoreError as error:
        problem = {"code": error.code, "message": error.message}
        return _Row(*origin, None, (), "", (), problem)
    return _Row(
        *origin,
        str(spec.contract),
        tuple(sorted(capability.value for capability in spec.capabilities)),
        spec.summary,
        _settings(spec),
        None,
    )


def _settings(spec: TierSpec) -> tuple[_Setting, ...]:
    return tuple(
        _Setting(
            field.alias or name,
            _type_name(field.annotation),
            field.is_required(),
            _default(field),
            " ".join((field.description or "").split()),
        )
        for name, field in spec.config_model.model_fields.items()
    )


def _default(field: FieldInfo) -> Any:
    from pydantic_core import to_jsonable_python

    if field.is_required() or field.default_factory is not None:
        return None
    # Secrets come out of this as asterisks.
    return to_jsonable_python(field.default, fallback=repr)


def _type_name(annotation: Any) -> str:
    """Write a type the way users read it: ``str | None``, ``list[int]``."""
    if annotation is type(None):
        return "None"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin is Union or origin is types.UnionType:
        return " | ".join(map(_type_name, arguments))
    if origin is not None and arguments:
        return f"{_type_name(origin)}[{', '.join(map(_type_name, arguments))}]"
    return getattr(annotation, "__name__", None) or str(annotation)


def _print_tables(console: Console, rows: list[_Row]) -> None:
    from rich.markup import escape
    from rich.table import Table

    overview = Table("type", "package", "contract", "capabilities", "summary", title="Tiers")
    for row in rows:
        summary = escape(row.summary) if row.error is None else "[red]broken, see below[/red]"
        overview.add_row(
            escape(row.type),
            escape(f"{row.distribution} {row.version}"),
            row.contract or "",
            ", ".join(row.capabilities),
            summary,
        )
    console.print(overview)
    for row in rows:
        if row.error is not None:
            # Outside of the table, where no column cuts the instructions off.
            console.print(
                f"{row.error['message']} [{row.error['code']}]", markup=False, soft_wrap=True
            )
        if not row.settings:
            continue
        settings = Table("setting", "type", "default", "meaning", title=f"Settings of {row.type}")
        for setting in row.settings:
            settings.add_row(
                escape(setting.name),
                escape(setting.type),
                "required" if setting.required else escape(json.dumps(setting.default)),
                escape(setting.description),
            )
        console.print(settings)
