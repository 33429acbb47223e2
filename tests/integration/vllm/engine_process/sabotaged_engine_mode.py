"""The engine mode with a worker that can be sabotaged."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from kv_core.vllm._spec import KVCoreOffloadingSpec

from .workers import sabotaged

__all__ = ["SabotagedKVCoreOffloadingSpec"]


class SabotagedKVCoreOffloadingSpec(KVCoreOffloadingSpec):  # type: ignore[misc]  # final
    """Our spec, unchanged but for a wrapper around its worker."""

    _wrapped: Any = None

    @override
    def get_worker(self, kv_caches: Any) -> Any:
        if self._wrapped is None:
            worker = super().get_worker(kv_caches)
            self._wrapped = sabotaged(worker, kv_caches, self.config.parallel.rank)
        return self._wrapped
