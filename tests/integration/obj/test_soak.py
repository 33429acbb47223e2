"""A slice of ``make obj-soak``: jobs on a real store, drawn by a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_tier_s3._harness import SeaweedServer

from .soak import BUCKET, soak

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.s3


def test_hundreds_of_jobs_leave_nothing_behind(tmp_path: Path) -> None:
    """Every job is reported once, every byte is right, and memory, threads and slots stay flat."""
    with SeaweedServer(tmp_path) as server:
        server.make_bucket(BUCKET)
        report = soak({**server.access.settings(BUCKET)}, jobs=600, seed=7)
    assert report.wrong == []
    assert report.jobs == 600
    assert min(report.stored, report.loaded, report.missing) > 50
