"""Whether anybody else has a namespace open, and may read what would be written over."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kv_tier_fs.segments._membership import MEMBERS_LOCK_NAME, Membership

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Join = Callable[..., Membership]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Return a function that makes a member of one folder; all leave in the end."""
    members: list[Membership] = []

    def run(**settings: Any) -> Membership:
        members.append(Membership(tmp_path, tmp_path))
        assert members[-1].join(1, **settings)
        return members[-1]

    yield run
    for member in members:
        member.leave()


def is_alone(member: Membership) -> bool:
    """Ask."""
    with member.alone(1) as alone:
        return alone


def test_one_member_is_alone_and_two_are_not(join: Join) -> None:
    """Whoever they are, and as soon as the other one has left."""
    one = join()
    assert is_alone(one)
    two = join()
    assert (is_alone(one), is_alone(two), is_alone(one)) == (False, False, False)
    two.leave()
    two.leave()
    assert is_alone(one)


def test_a_reader_counts(join: Join) -> None:
    """It opens the file for reading only, as in a folder that it may not write to."""
    one = join()
    join(create=False)
    assert not is_alone(one)


def test_a_reader_does_not_make_the_file(tmp_path: Path) -> None:
    """It is no member before there is a writer."""
    reader = Membership(tmp_path, tmp_path)
    assert not reader.join(0, create=False)
    assert list(tmp_path.iterdir()) == []


def test_nobody_joins_while_somebody_is_alone(join: Join, tmp_path: Path) -> None:
    """Afterwards, both share the lock again."""
    one = join()
    late = Membership(tmp_path, tmp_path)
    with one.alone(1) as alone:
        assert alone
        assert not late.join(0.01)
    assert late.join(1)
    assert not is_alone(one)
    late.leave()
    assert is_alone(one)


def test_a_failed_attempt_does_not_cost_membership(join: Join) -> None:
    """The kernel drops the shared lock first; it has to be taken again."""
    one, two = join(), join()
    assert not is_alone(one)
    assert not is_alone(two)


def test_joining_again_is_fine(join: Join) -> None:
    """A follower asks before every look."""
    one = join()
    assert one.join(0)
    assert is_alone(one)


def test_a_file_that_was_removed_makes_nobody_alone(join: Join, tmp_path: Path) -> None:
    """Others hold another one of the same name by now."""
    one = join()
    (tmp_path / MEMBERS_LOCK_NAME).unlink()
    assert not is_alone(one)
    join()
    assert not is_alone(one)


def test_joining_again_does_not_let_others_in(join: Join, tmp_path: Path) -> None:
    """A follower that joins before its look waits for the thread that is alone."""
    one = join()
    late = Membership(tmp_path, tmp_path)
    joined = threading.Event()

    def follow() -> None:
        assert one.join(1)
        joined.set()

    follower = threading.Thread(target=follow)
    with one.alone(1) as alone:
        assert alone
        follower.start()
        assert not joined.wait(0.05)
        assert not late.join(0)
    assert joined.wait(20)
    follower.join()
    assert late.join(1)
    late.leave()


def test_a_member_of_a_file_that_was_removed_joins_the_new_one(join: Join, tmp_path: Path) -> None:
    """Otherwise somebody who comes later would be alone, and write over what it reads."""
    reader = join()
    (tmp_path / MEMBERS_LOCK_NAME).unlink()
    writer = join()
    assert is_alone(writer)
    assert reader.join(1, create=False)
    assert not is_alone(writer)


def test_a_member_outlives_its_folder(tmp_path: Path) -> None:
    """What it knows of the folder is still to be taken back, which a look does."""
    folder = tmp_path / "namespace"
    folder.mkdir()
    member = Membership(tmp_path, folder)
    assert member.join(1)
    (folder / MEMBERS_LOCK_NAME).unlink()
    folder.rmdir()
    assert member.join(1)
    assert member.join(1, create=False)
    folder.mkdir()
    assert member.join(1)
    assert is_alone(member)
    member.leave()


def test_who_has_not_joined_is_not_alone(tmp_path: Path) -> None:
    """Nor after leaving."""
    assert not is_alone(Membership(tmp_path, tmp_path))


def test_the_file_is_private(join: Join, tmp_path: Path) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        join()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / MEMBERS_LOCK_NAME).stat().st_mode) == 0o600
