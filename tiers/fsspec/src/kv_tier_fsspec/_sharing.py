"""How the threads of a tier come by a blocking filesystem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

from kv_tier_fsspec._filesystem import make_filesystem

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_tier_fsspec._config import FsspecConfig

__all__ = ["Filesystems", "OneFilesystem", "share_filesystem"]

ResultT = TypeVar("ResultT")


class Filesystems(Protocol):
    """Hands a filesystem to whoever needs one. Thread-safe."""

    def run(self, work: Callable[[Any], ResultT], *, patience_s: float | None = None) -> ResultT:
        """Return what a function makes of a filesystem.

        Args:
            work: Called with a filesystem that is this thread's until it returns. Called again
                when the connection was lost in the middle: it must bear that.
            patience_s: How long it may last, where that can be enforced; ``None`` for as long as
                the transfer of a block may.
        """

    def strip(self, url: str) -> str:
        """Return the path that a URL names."""

    def close(self) -> None:
        """End all connections. What still runs fails. Idempotent."""


@final
class OneFilesystem:
    """One for all threads: a local folder, memory, and what else bears that.

    Args:
        config: Settings of the tier.

    Attributes:
        fs: The filesystem.
    """

    def __init__(self, config: FsspecConfig) -> None:
        self.fs: Any = make_filesystem(config)

    def run(
        self,
        work: Callable[[Any], ResultT],
        *,
        patience_s: float | None = None,  # noqa: ARG002 - a call of the system ends when it ends
    ) -> ResultT:
        """Call it."""
        return work(self.fs)

    def strip(self, url: str) -> str:
        """Return the path that a URL names."""
        return str(self.fs._strip_protocol(url))

    def close(self) -> None:
        """Close the connection, where there is one."""
        # No common way to close a filesystem exists; of those that have a client, this is how.
        close = getattr(getattr(self.fs, "client", None), "close", None)
        if close is not None:
            close()


def share_filesystem(config: FsspecConfig) -> Filesystems:
    """Return what the threads of a tier share.

    Raises:
        TierOpenError: The filesystem refuses its options, or is not installed.
    """
    if config.protocol in {"sftp", "ssh"}:
        from kv_tier_fsspec._sftp import SftpSessions

        return SftpSessions(config)
    return OneFilesystem(config)
