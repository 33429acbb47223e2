"""Finds what is to be tested: tier types by name, or a harness by ``module:function``."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_conformance.harness import Fault, Harness, HarnessError
from kv_conformance.rig import SubjectType
from kv_core.contract import Capability
from kv_core.errors import KVCoreError, UnknownTierError
from kv_core.plugins import TierRegistry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_core.contract import TierSpec

__all__ = ["find_subjects", "load_harness", "load_spec", "refuse_strange_faults"]

# As the settings of an engine name it, and as a file of the report can be named.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MOST_CHARS: Final = 64


def find_subjects(
    tiers: Sequence[str], harnesses: Sequence[str], workdir: Path
) -> list[SubjectType]:
    """Return what is to be tested.

    Args:
        tiers: Tier types; with no tiers and no harnesses, every installed one.
        harnesses: References ``module:function``.
        workdir: Folder of the run.

    Raises:
        HarnessError: A tier or harness cannot be found or is unusable; the message says why.
    """
    registry = TierRegistry()
    for name in tiers:
        if "/" in name or "::" in name or name.endswith(".py"):
            raise HarnessError(
                f"{name!r} is a path, and the arguments of --conformance are tier types. What is "
                "tested with is always the installed suite; a tier that is not installed is named "
                "with --conformance-harness module:function"
            )
    if not tiers and not harnesses:
        tiers = sorted({claim.type for claim in registry.installed()})
        if not tiers:
            raise HarnessError(
                "no tier is installed in this environment, so there is nothing to test. Install "
                "one (pip install kv-tier-example), or name a harness with "
                "--conformance-harness module:function"
            )
    subjects = [_installed(registry, tier, _folder(workdir, tier)) for tier in tiers]
    for reference in harnesses:
        folder = _folder(workdir, reference)
        harness = load_harness(reference, folder)
        subjects.append(
            SubjectType(harness.spec.type, reference, harness.spec, harness, reference, folder)
        )
    for subject in subjects:
        _refuse_strange_name(subject.name)
        _refuse_unknown_capabilities(subject.spec)
    names = [subject.name for subject in subjects]
    for name in names:
        if names.count(name) > 1:
            raise HarnessError(
                f"the tier type {name!r} is asked for {names.count(name)} times, by its name or by "
                "a harness: name it once"
            )
    return subjects


def _refuse_strange_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _MOST_CHARS:
        raise HarnessError(
            f"the TierSpec has the type {name!r}: a type is a word of letters, digits, '_', '.' "
            f"and '-' that starts with a letter or digit, of at most {_MOST_CHARS} characters"
        )


def _refuse_unknown_capabilities(spec: TierSpec) -> None:
    declared: frozenset[object] = spec.capabilities
    if type(declared) is not frozenset:
        raise HarnessError(
            f"tier {spec.type!r} declares its capabilities as {type(declared).__name__}: make it "
            "a frozenset of members of Capability"
        )
    unknown = [item for item in declared if not isinstance(item, Capability)]
    if unknown:
        raise HarnessError(
            f"tier {spec.type!r} declares {', '.join(sorted(map(repr, unknown)))}, which the "
            f"contract does not know: declare members of Capability, which are "
            f"{', '.join(member.name for member in Capability)}"
        )


def refuse_strange_faults(subject: SubjectType) -> None:
    """Look at the faults that a harness says it makes, when it has been started.

    Raises:
        HarnessError: They are not a set of members of ``Fault``.
    """
    faults: object = subject.harness.faults
    if not isinstance(faults, (set, frozenset)) or not all(isinstance(f, Fault) for f in faults):
        raise HarnessError(
            f"the harness of {subject.name} says that it makes the faults {faults!r}: expected a "
            "frozenset of members of kv_conformance.harness.Fault"
        )


def _folder(workdir: Path, name: str) -> Path:
    folder = workdir / "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _installed(registry: TierRegistry, tier: str, workdir: Path) -> SubjectType:
    try:
        spec = registry.spec(tier)
        harness = registry.conformance_harness(tier, workdir)
    except UnknownTierError as error:
        raise HarnessError(f"{error}; a package of your own: pip install -e FOLDER") from error
    except KVCoreError as error:
        raise HarnessError(str(error)) from error
    origin = next(claim.origin for claim in registry.installed() if claim.type == tier)
    checked = _checked(harness, f"the harness of tier {tier!r}")
    if checked.spec.type != spec.type:
        raise HarnessError(
            f"the harness of tier {tier!r} is for the tier {checked.spec.type!r}: return the "
            "TierSpec of kv_core_register_tier from both"
        )
    if spec.refine is not None:
        # The harness says for which settings it tests; that they lead to what it declares is
        # compared at every opening.
        spec = replace(checked.spec, refine=spec.refine)
    return SubjectType(tier, origin, spec, checked, tier, workdir)


def load_harness(reference: str, workdir: Path) -> Harness:
    """Make the harness that a reference ``module:function`` names.

    The working directory is searched last: for a tier that is not packaged yet.

    Raises:
        HarnessError: It cannot be found, or is no harness.
    """
    module_name, colon, function_name = reference.partition(":")
    if not colon or not module_name or not function_name:
        raise HarnessError(
            f"--conformance-harness takes module:function, found {reference!r} (for example "
            "my_tier.harness:make)"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise HarnessError(
            f"the harness {reference!r} cannot be imported: {error}. It is looked for in the "
            "environment and in the working directory"
        ) from error
    try:
        harness = function(workdir)
    except Exception as error:
        raise HarnessError(
            f"the harness {reference!r} cannot be made: {type(error).__name__}: {error}. It is "
            "called with one argument, the folder for the tier's storage"
        ) from error
    return _checked(harness, f"what {reference!r} returned")


def load_spec(reference: str, workdir: Path) -> TierSpec:
    """Return the declaration that a reference of a subject names. For helper processes."""
    if ":" in reference:
        return load_harness(reference, workdir).spec
    return TierRegistry().spec(reference)


def _checked(harness: object, what: str) -> Harness:
    if not isinstance(harness, Harness):
        members = {*Harness.__annotations__, *vars(Harness)}
        missing = sorted(
            name for name in members if not name.startswith("_") and not hasattr(harness, name)
        )
        raise HarnessError(
            f"{what} is of class {type(harness).__name__}, without {', '.join(missing)}: derive "
            "it from kv_conformance.harness.BaseHarness and write what is missing"
        )
    return harness
