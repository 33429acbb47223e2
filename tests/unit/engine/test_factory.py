"""Offloading specs by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from kv_core.engine import OffloadingSpec, OffloadingSpecFactory
from kv_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_core.engine import (
        LoadStoreSpec,
        OffloadingConfig,
        OffloadingHandler,
        OffloadingManager,
    )

    MakeConfig = Callable[..., OffloadingConfig]


class MySpec(OffloadingSpec):
    """A spec that makes nothing."""

    @override
    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    @override
    def get_handlers(
        self, kv_caches: object
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        return iter(())


def test_a_registered_spec_is_made_with_the_config(make_config: MakeConfig) -> None:
    """``spec_name`` picks it."""
    factory = OffloadingSpecFactory()
    factory.register_spec("mine", __name__, "MySpec")
    config = make_config(16, extra_config={"spec_name": "mine"})
    spec = factory.create_spec(config)
    assert type(spec).__name__ == "MySpec"
    assert spec.config is config


def test_registration_imports_nothing(make_config: MakeConfig) -> None:
    """A module is imported, and its absence noticed, when its spec is asked for."""
    factory = OffloadingSpecFactory()
    factory.register_spec("mine", "kv_core_no_such_module", "Spec")
    assert "kv_core_no_such_module" not in sys.modules
    with pytest.raises(ConfigError, match="cannot be loaded from module 'kv_core_no_such_module'"):
        factory.create_spec(make_config(16, extra_config={"spec_name": "mine"}))


def test_the_default_is_the_two_level_spec(make_config: MakeConfig) -> None:
    """Without ``spec_name``, ``CPUOffloadingSpec`` is meant."""
    factory = OffloadingSpecFactory()
    factory.register_spec("CPUOffloadingSpec", __name__, "MySpec")
    assert type(factory.create_spec(make_config(16))).__name__ == "MySpec"


def test_an_unregistered_name_is_a_class_of_the_named_module(make_config: MakeConfig) -> None:
    """``spec_module_path`` is the way in for a spec of one's own."""
    extra_config = {"spec_name": "MySpec", "spec_module_path": __name__}
    spec = OffloadingSpecFactory().create_spec(make_config(16, extra_config=extra_config))
    assert type(spec).__name__ == "MySpec"


def test_an_unknown_name_lists_the_registered_ones(make_config: MakeConfig) -> None:
    """The error says what there is and how to bring another."""
    factory = OffloadingSpecFactory()
    factory.register_spec("b", "m", "C")
    factory.register_spec("a", "m", "C")
    with pytest.raises(ConfigError, match=r"'c' \(registered: a, b\).*spec_module_path") as caught:
        factory.create_spec(make_config(16, extra_config={"spec_name": "c"}))
    assert caught.value.setting == "spec_name"


def test_a_taken_name_is_refused() -> None:
    """The error names who has it."""
    factory = OffloadingSpecFactory()
    factory.register_spec("a", "first.module", "Spec")
    with pytest.raises(ConfigError, match=r"first\.module:Spec"):
        factory.register_spec("a", "second.module", "Spec")


@pytest.mark.parametrize("class_name", ["MakeNothing", "NOT_A_CLASS"])
def test_a_class_that_is_no_spec_is_refused(make_config: MakeConfig, class_name: str) -> None:
    """What a name leads to is checked before it is called."""
    factory = OffloadingSpecFactory()
    factory.register_spec("a", __name__, class_name)
    with pytest.raises(ConfigError, match="is not a subclass of OffloadingSpec"):
        factory.create_spec(make_config(16, extra_config={"spec_name": "a"}))


def test_a_class_that_is_absent_is_refused(make_config: MakeConfig) -> None:
    """The module imports, but has no such class."""
    extra_config = {"spec_name": "Absent", "spec_module_path": __name__}
    with pytest.raises(ConfigError, match="'Absent' cannot be loaded") as caught:
        OffloadingSpecFactory().create_spec(make_config(16, extra_config=extra_config))
    assert caught.value.setting == "spec_module_path"


class MakeNothing:
    """Not a spec."""


NOT_A_CLASS = 7
