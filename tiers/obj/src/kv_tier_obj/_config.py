"""Settings of the obj tier."""

from __future__ import annotations

import os
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field
from typing_extensions import override

from kv_core.errors import ConfigError
from kv_core.tierkit.objects import TRAILER_BYTES
from kv_tier_s3 import BucketConfig, S3Config

__all__ = ["GUARD_BYTES", "ObjConfig", "slot_bytes_of"]

GUARD_BYTES: Final = 16
"""Room behind an object that is read, where one that is too long leaves its traces."""

_PAGE_BYTES: Final = 4096
_LEAST_SLOTS: Final = 2

_KEY_VARIABLE: Final = "AWS_ACCESS_KEY_ID"
# In the order in which Amazon's client looks at them.
_PROFILE_VARIABLES: Final = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")

# What the requests beside the blocks need.
_CONTROL_CONNECTIONS: Final = 4


def slot_bytes_of(object_bytes: int) -> int:
    """Return the staging memory for one object in flight."""
    return -(-(object_bytes + GUARD_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


class ObjConfig(BucketConfig):
    """What an operator can set of the tier ``obj``."""

    io_threads: int = Field(default=16, ge=2, le=256)
    """Blocks in flight, of which at most half are stores. Twice 'threads' keep NIXL busy, and the
    fewer slots there are, the sooner each is used again, with its memory at hand.
    """
    staging_bytes: int = Field(default=2**28, ge=2**16)
    """Most memory for copies of blocks in flight, registered with NIXL once; half of it is the
    largest block. Bytes, or text such as '256MiB'.
    """
    threads: int = Field(default=8, ge=1, le=256)
    """Threads of NIXL, for loads, for stores and for lookups each: so many requests of a kind are
    at the store at the same time.
    """
    req_checksum: Literal["required", "supported"] = "required"
    """Whether requests carry a checksum of their own, beside the tier's: 'required' where S3 asks
    for one, 'supported' wherever it could. Many stores refuse the latter.
    """
    request_timeout_s: float = Field(default=20.0, gt=0, le=3600, allow_inf_nan=False)
    """Longest wait for one object, NIXL's own attempts included. The staging memory of a request
    that is given up is not used again before NIXL lets go of it.
    """

    @property
    @override
    def most_block_bytes(self) -> int:
        return self.staging_bytes // _LEAST_SLOTS - TRAILER_BYTES - GUARD_BYTES - _PAGE_BYTES

    def most_slots(self, object_bytes: int) -> int:
        """Return how many objects may be in flight; enough for some that NIXL does not let go."""
        return max(
            _LEAST_SLOTS,
            min(2 * self.io_threads, self.staging_bytes // slot_bytes_of(object_bytes)),
        )

    def control(self) -> S3Config:
        """Return the settings of the client for everything beside the blocks."""
        shared: dict[str, Any] = {
            name: getattr(self, name)
            for name in BucketConfig.model_fields
            if name not in {"staging_bytes", "io_threads"}
        }
        return S3Config(
            **shared,
            io_threads=_CONTROL_CONNECTIONS,
            max_connections=_CONTROL_CONNECTIONS,
            read_timeout_s=self.request_timeout_s,
        )

    def nixl_parameters(self, default_region: str) -> dict[str, str]:
        """Return the settings as NIXL's plugin OBJ takes them. Holds secrets."""
        parameters = {
            "bucket": self.bucket,
            "num_threads": str(self.threads),
            "req_checksum": self.req_checksum,
            "resp_checksum": "required",
            "use_virtual_addressing": "false" if self.uses_path_style else "true",
        }
        region = self.region
        if self.endpoint_url is not None:
            parameters["endpoint_override"] = self.endpoint_url
            parameters["scheme"] = urlsplit(self.endpoint_url).scheme
            region = region or default_region
        if region is not None:
            parameters["region"] = region
        if self.access_key_id is not None and self.secret_access_key is not None:
            parameters["access_key"] = self.access_key_id.get_secret_value()
            parameters["secret_key"] = self.secret_access_key.get_secret_value()
        if self.session_token is not None:
            parameters["session_token"] = self.session_token.get_secret_value()
        if self.ca_bundle is not None:
            parameters["ca_bundle"] = str(self.ca_bundle)
        return parameters

    def nixl_defaults(self) -> dict[str, str]:
        """Return what the client inside NIXL reads from the environment, unless it is set there."""
        return {
            # Its own way tries eleven times, and a minute long when a store hangs.
            "AWS_RETRY_MODE": "standard",
            "AWS_MAX_ATTEMPTS": str(self.max_attempts),
        }

    def nixl_environment(self) -> dict[str, str]:
        """Return what that client is to read there, whatever is set.

        Raises:
            ConfigError: It would read something else first.
        """
        if self.profile is None or self.access_key_id is not None:
            # Without a profile the environment decides; beside a key of ours it is not read.
            return {}
        if os.environ.get(_KEY_VARIABLE):
            raise ConfigError(
                f"'profile' is {self.profile!r} and {_KEY_VARIABLE} is set: the client within NIXL "
                f"prefers that key, now and later, to any profile. Please unset {_KEY_VARIABLE}, "
                "or leave 'profile' out",
                setting="profile",
            )
        return dict.fromkeys(_PROFILE_VARIABLES, self.profile)
