"""A process with a tier that forks: run by ``test_processes.py`` with settings as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys

from kv_core.contract import parse_tier_config
from kv_core.errors import TierClosedError
from kv_core.tierkit.testing import TierDriver, example_key
from kv_tier_s3 import S3Config, kv_core_register_tier

KEYS = [example_key(number) for number in range(8)]


def main() -> int:
    """Fork with connections open; the child ends like any process, and the parent works on."""
    config = parse_tier_config("cold", S3Config, json.loads(sys.argv[1]))
    factory = kv_core_register_tier().factory
    tier = TierDriver(factory, config, num_blocks=32, block_bytes=4096)
    assert tier.store(KEYS[:4]).success
    child = os.fork()
    if not child:
        try:
            tier.tier.lookup(KEYS[0], tier.request)
        except TierClosedError:
            # All the way through the end of an interpreter: collection, and what atexit runs.
            del tier
            gc.collect()
            return 42
        return 1
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42, status
    assert tier.load(KEYS[:4]).success
    assert tier.loaded(KEYS[:4]) == KEYS[:4]
    assert tier.store(KEYS[4:]).success
    tier.close()
    print("the parent works on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
