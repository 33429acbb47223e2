"""Harnesses that put vLLM's own tiers, unmodified, under the conformance suite.

``pytest --conformance --conformance-harness kv_core.vllm.conformance:fs`` (or ``:example``,
``:obj``, ``:obj_rgw``), in an environment that has vLLM and ``kv-conformance[fuse]``; for ``obj``
also NIXL and ``kv-tier-s3[conformance]``, whose servers it uses. What they find is published,
version by version, under ``docs/conformance``.

vLLM's tiers were written for vLLM's interface, which asks for less than the contract does. The
adapter translates and adds nothing: what a clause finds missing here is missing in the tier or in
the interface, and the published page says which.

Importing this package imports neither vLLM nor the suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from kv_core.vllm.conformance._example import ExampleHarness
    from kv_core.vllm.conformance._fs import FsHarness
    from kv_core.vllm.conformance._obj import ObjHarness, RgwObjHarness

__all__ = ["example", "fs", "obj", "obj_rgw"]


def fs(workdir: Path) -> FsHarness:
    """Make the harness of vLLM's tier ``fs``."""
    from kv_core.vllm.conformance._fs import FsHarness

    return FsHarness(workdir)


def example(workdir: Path) -> ExampleHarness:
    """Make the harness of vLLM's tier ``example``."""
    from kv_core.vllm.conformance._example import ExampleHarness

    return ExampleHarness(workdir)


def obj(workdir: Path) -> ObjHarness:
    """Make the harness of vLLM's tier ``obj``, on SeaweedFS."""
    from kv_core.vllm.conformance._obj import ObjHarness

    return ObjHarness(workdir)


def obj_rgw(workdir: Path) -> RgwObjHarness:
    """Make the harness of vLLM's tier ``obj``, on Ceph's RGW."""
    from kv_core.vllm.conformance._obj import RgwObjHarness

    return RgwObjHarness(workdir)
