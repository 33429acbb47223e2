"""The lifecycle rules of the documentation, on Ceph's gateway with days that last a second.

A bucket is bounded by such rules and by nothing else, so what they do must be what a tier expects:
objects go one by one, whole, at any time, and are misses from then on.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kv_conformance.harness import HarnessError
from kv_core.tierkit.testing import example_key
from kv_tier_s3._harness import Rgw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_tier_s3._harness import S3Server

pytestmark = pytest.mark.s3

RULES: Final = Path(__file__).parents[3] / "docs" / "s3-lifecycle.json"
BUCKET: Final = "kv-expires"
DAY_S: Final = 1
PATIENCE_S: Final = 60.0
KEYS: Final = [example_key(number) for number in range(8)]


@pytest.fixture(scope="module")
def rules() -> dict[str, Any]:
    """Return the rules."""
    found: dict[str, Any] = json.loads(RULES.read_text())
    return found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rgw]:
    """Return a gateway whose days are short."""
    server = Rgw(tmp_path_factory.mktemp("rgw-of-short-days"), lifecycle_day_s=DAY_S)
    try:
        server.start()
    except HarnessError as error:
        pytest.skip(str(error))
    server.make_bucket(BUCKET)
    yield server
    server.stop()


def names(client: Any) -> set[str]:
    """Return the names of all objects in the bucket."""
    return {item["Key"] for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())}


def uploads(client: Any) -> set[str]:
    """Return the names of all unfinished uploads in the bucket."""
    found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return {item["Key"] for item in found}


def wait_until(condition: Callable[[], bool], what: str) -> float:
    """Wait for something, and return how many seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE_S, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def test_rules_bound_a_bucket_under_a_running_tier(
    gateway: Rgw, rules: dict[str, Any], open_tier: Any
) -> None:
    """Old blocks go, young ones and what is not the tier's stay; a lost block is stored again."""
    (rule,) = rules["Rules"]
    prefix, age_s = rule["Filter"]["Prefix"], rule["Expiration"]["Days"] * DAY_S
    client = gateway.access.client()
    tier = open_tier({**gateway.access.settings(BUCKET), "prefix": prefix, "job_deadline_s": 60.0})
    assert tier.store(KEYS[:4]).success
    client.put_object(Bucket=BUCKET, Key="other/object", Body=b"not ours")
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}unfinished")
    client.create_multipart_upload(Bucket=BUCKET, Key="other/unfinished")
    stored_at = time.monotonic()
    client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)

    wait_until(lambda: uploads(client) == {"other/unfinished"}, "the upload is aborted")
    if time.monotonic() - stored_at < age_s - DAY_S:
        assert tier.resolve(KEYS[:4]) == [True] * 4
    time.sleep(max(0.0, stored_at + age_s - 2 * DAY_S - time.monotonic()))
    assert tier.store(KEYS[4:]).success
    young_until = time.monotonic() + age_s - DAY_S

    wait_until(lambda: not any(_name_of(key, names(client)) for key in KEYS[:4]), "blocks expire")
    are_there = [bool(_name_of(key, names(client))) for key in KEYS[4:]]
    assert time.monotonic() > young_until or are_there == [True] * 4
    tier.tier.on_request_finished(tier.request)
    assert tier.resolve(KEYS[:4]) == [False] * 4
    result = tier.load(KEYS[:2])
    assert result.error is not None
    assert result.error.kind.value == "missing"
    assert tier.store(KEYS[:4]).success
    assert tier.load(KEYS[:4]).success
    assert tier.loaded(KEYS[:4]) == KEYS[:4]
    assert "other/object" in names(client)


def _name_of(key: bytes, found: set[str]) -> str:
    digits = key[:-4].hex()
    return next((name for name in found if digits in name), "")


@pytest.mark.parametrize("name", ["seaweedfs", "rgw"])
def test_servers_take_the_rules_as_they_are(servers: Any, rules: dict[str, Any], name: str) -> None:
    """As the documentation says to set them; they are told as they were set."""
    server: S3Server = servers(name)
    server.make_bucket("kv-with-rules")
    client = server.access.client()
    client.put_bucket_lifecycle_configuration(Bucket="kv-with-rules", LifecycleConfiguration=rules)
    found = client.get_bucket_lifecycle_configuration(Bucket="kv-with-rules")["Rules"]
    assert found == rules["Rules"]
    client.delete_bucket_lifecycle(Bucket="kv-with-rules")
