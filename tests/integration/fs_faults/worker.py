"""A process with one file system tier that does what it is told: one JSON object a line.

Run ``python worker.py ORDER`` with an order such as
``{"settings": {"root_dir": "/tmp/x", "layout": "files"}, "block_bytes": 4096, "num_blocks": 64}``.
The first line of the answer says that the tier is open, or why it is not; then every line read is
a command and every line written its answer. Blocks are numbers; their bytes follow from them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before the user changes: another user may have no access to the folders of the interpreter.
from kv_core.contract import Capability, parse_tier_config
from kv_core.errors import KVCoreError
from kv_core.plugins import check_tier
from kv_core.tierkit.testing import TierDriver, example_key, example_namespace
from kv_tier_fs import kv_core_register_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def open_driver(order: Mapping[str, Any]) -> TierDriver:
    """Open the tier of an order.

    Raises:
        KVCoreError: It cannot be opened.
    """
    spec = kv_core_register_tier()
    settings = {"min_free_bytes": 1, **order["settings"]}
    checked = check_tier(spec, name="fs", settings=settings)
    config = parse_tier_config("fs", spec.config_model, settings)
    driver = TierDriver(
        checked.spec.factory,
        config,
        block_bytes=order.get("block_bytes", 4096),
        num_blocks=order.get("num_blocks", 64),
        namespace=example_namespace(order.get("block_bytes", 4096), **order.get("namespace", {})),
        tier_name="fs",
    )
    if Capability.EVENTS in checked.spec.capabilities:
        driver.tier.take_events()
    return driver


class Commands:
    """What a worker can be told. Every method is a command and returns its answer."""

    def __init__(self, driver: TierDriver) -> None:
        self._driver = driver

    def store(self, blocks: Sequence[int]) -> dict[str, Any]:
        """Store blocks; say which are stored and why the others are not."""
        keys = {example_key(block): block for block in blocks}
        result = self._driver.store(list(keys))
        stored = keys if result.success else result.successful_keys
        return {"stored": [keys[key] for key in stored], **_error(result.error)}

    def load(self, blocks: Sequence[int]) -> dict[str, Any]:
        """Load blocks; say which came back, and which of those have wrong bytes."""
        keys = {example_key(block): block for block in blocks}
        result = self._driver.load(list(keys))
        loaded = [keys[key] for key in (keys if result.success else result.successful_keys)]
        right = {keys[key] for key in self._driver.loaded(list(keys))}
        wrong = [block for block in loaded if block not in right]
        return {"loaded": loaded, "wrong": wrong, **_error(result.error)}

    def find(self, blocks: Sequence[int]) -> dict[str, Any]:
        """Look blocks up for a request of their own."""
        keys = [example_key(block) for block in blocks]
        driver = self._driver
        driver.tier.on_request_finished(driver.request)
        driver.tier.on_new_request(driver.request)
        answers = driver.resolve(keys)
        return {"found": [block for block, hit in zip(blocks, answers, strict=True) if hit]}

    def delete(self, blocks: Sequence[int]) -> dict[str, Any]:
        """Delete blocks."""
        self._driver.tier.delete([example_key(block) for block in blocks])
        self._driver.step()
        return {}

    def usage(self) -> dict[str, Any]:
        """Return blocks, bytes and capacity."""
        usage = self._driver.tier.usage()
        return {
            "blocks": usage.blocks,
            "bytes": usage.bytes,
            "capacity_bytes": usage.capacity_bytes,
        }

    def stats(self) -> dict[str, Any]:
        """Return the counters of the tier."""
        return dict(self._driver.tier.get_stats())

    def few_files(self, spare: int) -> dict[str, Any]:
        """Allow so many more open files than there are; a negative number lifts that."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if spare < 0:
            soft = hard
        else:
            # The limit is on the number of a descriptor, and there may be gaps below.
            numbers = {int(link.name) for link in Path("/proc/self/fd").iterdir()}
            soft, free = 0, 0
            while free < spare or soft <= max(numbers, default=0):
                free += soft not in numbers
                soft += 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return {}

    def close(self) -> dict[str, Any]:
        """Shut the tier down."""
        self._driver.close()
        return {}


def _error(error: Any) -> dict[str, Any]:
    if error is None:
        return {"error": None, "message": ""}
    return {"error": error.kind.value, "message": error.message}


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def main(text: str) -> None:
    """Obey until the input ends."""
    order = json.loads(text)
    if "umask" in order:
        os.umask(order["umask"])
    if "user" in order:
        _become(order["user"])
    try:
        commands = Commands(open_driver(order))
    except KVCoreError as error:
        _say({"raised": type(error).__name__, "message": str(error)})
        return
    _say({"ready": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        call: Callable[..., dict[str, Any]] = getattr(commands, command.pop("do"))
        try:
            _say(call(**command))
        except Exception as error:  # noqa: BLE001 - the test is told, and judges
            _say({"raised": type(error).__name__, "message": str(error)})


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
