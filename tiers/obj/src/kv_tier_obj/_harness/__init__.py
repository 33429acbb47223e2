"""How the conformance suite drives this tier, and reaches the objects below it.

Needs the extra ``kv-tier-obj[conformance]``, and NIXL; the tier itself never imports this.
"""

from kv_tier_obj._harness._harness import ObjHarness, RgwObjHarness

__all__ = ["ObjHarness", "RgwObjHarness"]
