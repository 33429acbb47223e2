"""Finds offloading specs by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, final

from kv_core.engine._spec import OffloadingSpec
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from kv_core.engine._config import OffloadingConfig

__all__ = ["OffloadingSpecFactory"]


@final
class OffloadingSpecFactory:
    """A registry of specs whose modules are imported only when asked for."""

    def __init__(self) -> None:
        self._registered: dict[str, tuple[str, str]] = {}

    def register_spec(self, name: str, module: str, class_name: str) -> None:
        """Register a spec without importing it.

        Raises:
            ConfigError: The name is taken.
        """
        if name in self._registered:
            raise ConfigError(
                f"an offloading spec named {name!r} is registered already "
                f"({':'.join(self._registered[name])})",
                setting="spec_name",
            )
        self._registered[name] = (module, class_name)

    def registered(self) -> tuple[str, ...]:
        """Return the names of the registered specs, sorted."""
        return tuple(sorted(self._registered))

    def create_spec(self, config: OffloadingConfig) -> OffloadingSpec:
        """Make the spec that ``extra_config["spec_name"]`` names.

        A name that is not registered is looked for as a class in
        ``extra_config["spec_module_path"]``.

        Raises:
            ConfigError: The name is unknown, its module does not import, or what it names is no
                :class:`OffloadingSpec`.
        """
        name = config.extra_config.get("spec_name", "CPUOffloadingSpec")
        module_name: str | None
        if name in self._registered:
            module_name, class_name = self._registered[name]
        else:
            module_name, class_name = config.extra_config.get("spec_module_path"), name
        if module_name is None:
            raise ConfigError(
                f"unknown offloading spec {name!r} (registered: "
                f"{', '.join(self.registered()) or 'none'}); set 'spec_module_path' for a "
                "spec of your own",
                setting="spec_name",
            )
        try:
            spec_class = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"offloading spec {class_name!r} cannot be loaded from module {module_name!r}: "
                f"{error}",
                setting="spec_module_path",
            ) from error
        if not (isinstance(spec_class, type) and issubclass(spec_class, OffloadingSpec)):
            raise ConfigError(
                f"{module_name}:{class_name} is not a subclass of OffloadingSpec",
                setting="spec_name",
            )
        return spec_class(config)
