"""Finds a build of NIXL whose OBJ plugin works, and opens agents of it, quietly.

NIXL comes in builds for several versions of CUDA, of which a process can load one. Its package
``nixl`` takes the build that fits the machine; on a machine without a GPU that is the newest, whose
OBJ plugin may need a library of NVIDIA's that is not there. So the plugin is tried before a build
is loaded. A build that somebody else has loaded already is the one that is used.

**Who owns what.** :func:`open_agent` may be called on any thread; ``_lock`` is held while the
environment of the process is not as the operator has set it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from kv_core.errors import TierOpenError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

__all__ = ["PLUGIN", "Agent", "open_agent"]

PLUGIN: Final = "OBJ"

_BUILDS: Final = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_LIBRARY: Final = f"libplugin_{PLUGIN}.so"
# What a plugin may need that does not come with it.
_OTHERS_LIBRARY: Final = re.compile(rb"libcuobjclient\.so(?:\.[0-9]+)*")
_LOG_LEVEL: Final = "NIXL_LOG_LEVEL"

_BUILDS_DIFFER: Final = (
    "The build for CUDA 13 needs libcuobjclient, which NVIDIA ships with GPUDirect Storage; the "
    "build for CUDA 12 does not, and works without a GPU, too"
)

_lock = threading.Lock()


class Agent(Protocol):
    """What the tier calls of NIXL's agent. Not thread-safe: each agent belongs to one thread."""

    name: str

    def register_memory(self, reg_list: Any, mem_type: str, backends: list[str]) -> Any:
        """Register memory or names; each descriptor is (address, length, device, name)."""

    def deregister_memory(self, dereg_list: Any, backends: list[str]) -> None:
        """Undo a registration."""

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str
    ) -> list[dict[str, str] | None]:
        """Say which objects are there. Blocks."""

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str, backends: list[str]
    ) -> Any:
        """Prepare one side of transfers; each descriptor is (address, length, device)."""

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Sequence[int],
        remote_xfer_side: Any,
        remote_indices: Sequence[int],
    ) -> Any:
        """Make a transfer of two prepared sides."""

    def transfer(self, handle: Any) -> str:
        """Begin a transfer."""

    def check_xfer_state(self, handle: Any) -> str:
        """Return ``PROC``, ``DONE`` or ``ERR``; or raise for an error."""

    def release_xfer_handle(self, handle: Any) -> None:
        """Let go of a transfer. Of one that runs, this does not end the use of its memory."""

    def release_dlist_handle(self, handle: Any) -> None:
        """Let go of a prepared side."""


def open_agent(
    name: str,
    parameters: Mapping[str, str],
    *,
    defaults: Mapping[str, str],
    environment: Mapping[str, str],
) -> Agent:
    """Open an agent with the OBJ plugin.

    Args:
        name: Name of the agent, unique in the process.
        parameters: Parameters of the plugin. Secret.
        defaults: Variables for the client inside the plugin, which it reads once. What the
            operator has set takes precedence.
        environment: The same, where these take precedence.

    Raises:
        TierOpenError: There is no NIXL, or its plugin cannot be used.
    """
    with _lock:
        api = _loaded()
        if api is None:
            with _quiet():
                api = _load()
        with _environment(defaults, environment):
            agent = api.nixl_agent(
                name, api.nixl_agent_config(enable_prog_thread=False, backends=[])
            )
            try:
                agent.create_backend(PLUGIN, dict(parameters))
            except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
                # Their text has names of statuses only; the cause could repeat parameters.
                raise _unusable(api, error) from None
    return cast("Agent", agent)


def _unusable(api: ModuleType, error: Exception) -> TierOpenError:
    build = api.__name__.partition(".")[0]
    kind = type(error).__name__
    if "NotFound" in kind:
        return TierOpenError(
            f"NIXL's build {build!r}, which this process has loaded, cannot load its plugin "
            f"{PLUGIN} ({kind}). {_BUILDS_DIFFER}. Leave only that one installed: pip uninstall "
            f"{build.replace('_', '-')}; pip install nixl-cu12"
        )
    return TierOpenError(
        f"NIXL's plugin {PLUGIN} refuses its parameters ({kind}). Check 'ca_bundle', "
        f"'endpoint_url' and 'threads'; with {_LOG_LEVEL}=ERROR it says more on stderr"
    )


def _loaded() -> ModuleType | None:
    """Return the build that this process has, if any."""
    for build in _BUILDS:
        found = sys.modules.get(f"{build}._api")
        if found is not None:
            return found
    return None


def _load() -> ModuleType:
    """Load a build whose plugin can be loaded.

    Raises:
        TierOpenError: There is none.
    """
    installed = [build for build in _preferred() if importlib.util.find_spec(build) is not None]
    if not installed:
        raise TierOpenError(
            "the tier 'obj' needs NVIDIA's NIXL, which is not installed. Run: pip install "
            "'kv-tier-obj[nixl]', or nixl-cu12 alone on a machine without a GPU"
        )
    reasons = []
    for build in installed:
        reason = _why_not(build)
        if reason is None:
            return _import(build)
        reasons.append(f"{build}: {reason}")
    raise TierOpenError(
        f"no installed build of NIXL can load its plugin {PLUGIN} ({'; '.join(reasons)}). "
        f"{_BUILDS_DIFFER}. Run: pip install nixl-cu12"
    )


def _preferred() -> list[str]:
    """Return the builds in order, that of the CUDA in use first: ``import nixl`` takes it, too."""
    if "torch" not in sys.modules:
        # NIXL would load it to ask, which takes seconds, and who has no torch has no CUDA to fit.
        return list(_BUILDS)
    try:
        major = importlib.import_module("nixl_meta_utils").detect_cuda_major()
    except Exception:  # noqa: BLE001 - a preference of another library, which may raise anything
        major = None
    preferred = f"nixl_cu{major}"
    return sorted(_BUILDS, key=lambda build: build != preferred)


def _why_not(build: str) -> str | None:
    """Say why the plugin of a build cannot be loaded; ``None`` when it can, or nobody knows."""
    spec = importlib.util.find_spec(build)
    folders = [Path(found) for found in (spec and spec.submodule_search_locations) or ()]
    plugins = [
        plugin
        for folder in folders
        if (plugin := folder.parent / f".{build}.mesonpy.libs" / "plugins" / _LIBRARY).exists()
    ]
    if os.environ.get("NIXL_PLUGIN_DIR") or not plugins:
        # Built or installed in another way.
        return None
    # Looked for by name: to load the plugin before NIXL would leave NIXL's logging half made.
    needed = _OTHERS_LIBRARY.search(plugins[0].read_bytes())
    if needed is None:
        return None
    try:
        ctypes.CDLL(needed[0].decode())
    except OSError as error:
        return " ".join(str(error).split())
    return None


def _import(build: str) -> ModuleType:
    try:
        # NIXL's own way to choose would choose another.
        return importlib.import_module(f"{build}._api")
    except ImportError as error:
        raise TierOpenError(
            f"NIXL's build {build!r} cannot be imported: {error}. A process can have one build of "
            "NIXL only: see that nothing imports another one, and uninstall those that are not used"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Load NIXL without what it does to the logging of the whole process.

    It logs to standard output and standard error, and every missing object as an error, at a level
    that it reads while it is loaded; and it switches ``logging.raiseExceptions``. An operator who
    sets NIXL_LOG_LEVEL gets what NIXL makes of it.
    """
    raises = logging.raiseExceptions
    with _environment({_LOG_LEVEL: "FATAL"}):
        try:
            yield
        finally:
            logging.raiseExceptions = raises


@contextmanager
def _environment(
    defaults: Mapping[str, str], variables: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Set variables of the environment for the time of a call; defaults unless they are set."""
    ours = {name: value for name, value in defaults.items() if name not in os.environ}
    ours.update(variables or {})
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
