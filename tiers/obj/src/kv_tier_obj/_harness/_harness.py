"""The harnesses: those of the tier ``s3``, whose objects are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from kv_tier_obj import kv_core_register_tier
from kv_tier_s3._harness import Rgw, S3Harness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_conformance.harness import Opening

__all__ = ["ObjHarness", "RgwObjHarness"]


class ObjHarness(S3Harness):
    """The harness of the tier ``obj``.

    The server is that of :class:`~kv_tier_s3._harness.S3Harness`, which also says how to name
    another. What the suite does behind the tier's back, it does with another client.
    """

    spec = kv_core_register_tier()

    @override
    def settings(self, opening: Opening) -> Mapping[str, Any]:
        """Return the settings for a prefix; through the proxy if faults will be injected."""
        return {
            name: value for name, value in super().settings(opening).items() if name != "engine"
        }


@final
class RgwObjHarness(ObjHarness):
    """The same on Ceph's gateway, over https."""

    server_type = Rgw
    tls = True
