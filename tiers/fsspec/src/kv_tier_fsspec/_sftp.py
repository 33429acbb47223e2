"""SSH connections of a tier, their sessions, and what happens when they are lost.

A session of paramiko must not be used by two threads at a time: each would take answers that the
other waits for. So a thread takes a session for as long as one block takes, and all sessions share
one connection, because a handshake costs more than a block. A connection that is lost is made anew
by the next thread that needs one, and what was under way is done again.

paramiko has waits without any limit: for the answer to a subsystem, for room in the socket. So
whatever lasts longer than it may has its connection closed under it, which ends all of them.

**Who owns what.** A session belongs to the thread that took it until it is given back.
``_changed`` guards ``_idle``, ``_opened``, ``_most``, ``_watched`` and ``_closed``. ``_opening``
guards ``_client`` and ``_failure``, and is held while a connection or a session is opened: one at a
time, because paramiko gives the error of one to whoever asks first. The watchdog's thread only ever
closes connections.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from kv_core.errors import ConfigError, KVCoreError, TierOpenError
from kv_tier_fsspec._filesystem import options_of
from kv_tier_fsspec._sftp_files import SftpFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_tier_fsspec._config import FsspecConfig

__all__ = ["HostKeyError", "SftpSessions"]

ResultT = TypeVar("ResultT")

_SSH_PORT: Final = 22
_LEAST_CONNECT_S: Final = 2.0
_MOST_CONNECT_S: Final = 10.0
_END_S: Final = 5.0
# The connection may be lost while the next one is made: a server that ends has several processes.
_ATTEMPTS: Final = 3
# Of the deadline of a job: a drain that waits until then must find the thread back.
_SHARE: Final = 0.6
_NAP_SHARE: Final = 0.1
# Connections that are made, at most, until one holds for as long as a session takes to open.
_CONNECTIONS: Final = 3


class HostKeyError(ConnectionError):
    """The server is not known to be the right one."""


# What another attempt would not change: no server, no access, no room for another session.
_FINAL_ERRORS: Final = (
    ConnectionRefusedError,
    PermissionError,
    TierOpenError,
    TimeoutError,
    HostKeyError,
    paramiko.ChannelException,
)
_POLICIES: Final[dict[str, type[paramiko.MissingHostKeyPolicy]]] = {
    "auto_add": paramiko.AutoAddPolicy,
    "warning": paramiko.WarningPolicy,
}


@final
class _Session:
    """One session over a connection."""

    def __init__(self, client: paramiko.SSHClient, ftp: paramiko.SFTPClient) -> None:
        self.client = client
        self.files = SftpFilesystem(ftp)
        self._channel: Any = ftp.get_channel()

    def is_alive(self) -> bool:
        gone = self._channel.closed or self._channel.eof_received
        return not gone and _is_alive(self.client)

    def close(self) -> None:
        self._channel.close()


@final
class SftpSessions:
    """Sessions of one server, for as many threads as ask.

    Args:
        config: Settings of the tier. No work may last longer than its ``job_deadline_s``.

    Raises:
        ConfigError: The settings name no host, or a file that is not there.
    """

    def __init__(self, config: FsspecConfig) -> None:
        _quieten()
        self._config = config
        self._options = options_of(config)
        self._host = self._options.pop("host", None)
        if not self._host:
            raise ConfigError(
                "'url' names no host; expected 'sftp://host/path' or 'sftp://user@host:port/path'",
                setting="url",
            )
        # Of fsspec's, for transactions, which are not used.
        self._options.pop("temppath", None)
        known_hosts = self._options.pop("known_hosts", None)
        self._known_hosts = None if known_hosts is None else _file_named("known_hosts", known_hosts)
        key_files = self._options.get("key_filename")
        if key_files:
            several = key_files if isinstance(key_files, (list, tuple)) else [key_files]
            self._options["key_filename"] = [_file_named("key_filename", file) for file in several]
        self._port = self._options.get("port", _SSH_PORT)
        self._policy = self._host_key_policy(self._options.pop("host_key_policy", "reject"))
        self._patience_s = config.job_deadline_s * _SHARE
        self._connect_s = min(_MOST_CONNECT_S, max(_LEAST_CONNECT_S, self._patience_s))
        for name in ("timeout", "banner_timeout", "auth_timeout", "channel_timeout"):
            self._options.setdefault(name, self._connect_s)
        self._opening = threading.Lock()
        self._failure: tuple[float, str] | None = None
        self._client: paramiko.SSHClient | None = None
        self._changed = threading.Condition()
        self._idle: list[_Session] = []
        self._opened = 0
        self._most: int | None = None
        self._watched: dict[object, tuple[float, paramiko.SSHClient]] = {}
        self._closed = False
        self._ended = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="kv-sftp-watchdog", daemon=True)
        self._watchdog.start()

    def run(self, work: Callable[[Any], ResultT], *, patience_s: float | None = None) -> ResultT:
        """Return what a function makes of a filesystem. See :class:`Filesystems`.

        Raises:
            TimeoutError: It lasted longer than it may.
            ConnectionError: There is no connection, again and again.
        """
        if patience_s is None:
            patience_s = self._patience_s
        end = 0.0
        for attempt in range(1, _ATTEMPTS + 1):
            session = self._take()
            if attempt == 1:
                # Making a connection is not the work, and has limits of its own.
                end = time.monotonic() + patience_s
            try:
                with self._watching(session.client, end):
                    result = work(session.files)
            except Exception as error:  # looked at below
                if session.is_alive() and isinstance(error, (OSError, KVCoreError)):
                    # An answer, if not the one that was wished for.
                    self._give_back(session)
                    raise
                # The whole connection: its other sessions may not have noticed yet.
                session.client.close()
                self._discard(session)
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"no end within {patience_s:g} s; the connection was closed"
                    ) from error
                if attempt == _ATTEMPTS or self._closed:
                    raise ConnectionError(
                        f"the connection to {self._host!r} was lost: {error}"
                    ) from error
            except BaseException:
                self._discard(session)
                raise
            else:
                self._give_back(session)
                return result
        raise AssertionError("the last attempt returns or raises")

    def strip(self, url: str) -> str:
        """Return the path that a URL names."""
        return str(SFTPFileSystem._strip_protocol(url))

    def close(self) -> None:
        """End the connection, the sessions over it, and the watchdog."""
        with self._changed:
            self._closed = True
            self._idle.clear()
            self._changed.notify_all()
        self._ended.set()
        self._watchdog.join()
        with self._opening:
            client, self._client = self._client, None
        if client is not None:
            _close(client)

    # -- sessions ---------------------------------------------------------------------------------

    def _take(self) -> _Session:
        """Return a session that nobody else has, and open one if need be."""
        end = time.monotonic() + self._patience_s
        while True:
            with self._changed:
                if self._closed:
                    raise ConnectionError("the sessions have been closed")
                while self._idle:
                    session = self._idle.pop()
                    if session.is_alive():
                        return session
                    self._opened -= 1
                if self._most is not None and self._opened >= self._most:
                    if not self._changed.wait(end - time.monotonic()):
                        raise TimeoutError(
                            f"the server allows {self._most} sessions, and none came free within "
                            f"{self._patience_s:g} s"
                        )
                    continue
                self._opened += 1
            try:
                return self._open_session()
            except paramiko.ChannelException:
                # OpenSSH allows ten at a time ('MaxSessions').
                with self._changed:
                    self._opened -= 1
                    if not self._opened:
                        raise
                    self._most = self._opened
            except BaseException:
                with self._changed:
                    self._opened -= 1
                    self._changed.notify()
                raise

    def _give_back(self, session: _Session) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(session)
                self._changed.notify()

    def _discard(self, session: _Session) -> None:
        with suppress(Exception):  # it is broken, and given up
            session.close()
        with self._changed:
            self._opened -= 1
            self._changed.notify()

    def _open_session(self) -> _Session:
        asked = time.monotonic()
        with self._opening:
            if self._failure is not None and self._failure[0] >= asked:
                # Of a wait that this thread was a part of.
                raise ConnectionError(self._failure[1])
            try:
                return self._open_persistently()
            except paramiko.ChannelException:
                raise
            except Exception as error:
                # Its text: the error has frames with slots of other threads.
                self._failure = (time.monotonic(), str(error))
                raise

    def _open_persistently(self) -> _Session:
        """Open a session, again where a connection breaks: it may have been lost unnoticed."""
        end = time.monotonic() + self._connect_s
        for attempt in range(1, _CONNECTIONS + 1):
            try:
                return self._session_over(self._connection())
            except _FINAL_ERRORS:
                raise
            except Exception:
                self._give_up_connection()
                if attempt == _CONNECTIONS or time.monotonic() >= end:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _session_over(self, client: paramiko.SSHClient) -> _Session:
        with self._watching(client, time.monotonic() + self._connect_s):
            transport = client.get_transport()
            if transport is None:
                raise ConnectionError("the connection was lost")
            channel = transport.open_session()
            try:
                channel.invoke_subsystem("sftp")
                return _Session(client, paramiko.SFTPClient(channel))
            except BaseException:
                channel.close()
                raise

    # -- the connection ---------------------------------------------------------------------------

    def _connection(self) -> paramiko.SSHClient:
        """Return the connection, and make one if need be. Called under ``_opening``."""
        if self._closed:
            raise ConnectionError("the sessions have been closed")
        if self._client is None or not _is_alive(self._client):
            self._give_up_connection()
            self._client = self._connect()
            with self._changed:
                self._most = None
        return self._client

    def _give_up_connection(self) -> None:
        """Close the connection, if there is one. Called under ``_opening``."""
        client, self._client = self._client, None
        if client is not None:
            _close(client)

    def _connect(self) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        try:
            # Without a name, the user's own file, if there is one.
            client.load_system_host_keys(self._known_hosts)
            client.set_missing_host_key_policy(self._policy)
            client.connect(self._host, **self._options)
        except TypeError as error:
            client.close()
            raise TierOpenError(
                "the filesystem 'sftp' refuses its 'storage_options': "
                f"{self._config.hide_secrets(str(error))}"
            ) from None
        except paramiko.BadHostKeyException as error:
            client.close()
            known_as = self._host if self._port == _SSH_PORT else f"'[{self._host}]:{self._port}'"
            file = "" if self._known_hosts is None else f" -f {shlex.quote(self._known_hosts)}"
            raise HostKeyError(
                f"{self._host!r} shows another host key than the known one: it was set up anew, "
                f"or somebody is in between. If it was, remove its line: ssh-keygen{file} -R "
                f"{known_as}"
            ) from error
        except paramiko.AuthenticationException as error:
            was_answered = _is_alive(client)
            client.close()
            if not was_answered:
                raise ConnectionError(f"no connection to {self._host!r}: {error}") from error
            raise PermissionError(f"{self._host!r} refuses the user: {error}") from error
        except paramiko.SSHException as error:
            client.close()
            raise ConnectionError(f"no connection to {self._host!r}: {error}") from error
        except BaseException:
            client.close()
            raise
        return client

    def _host_key_policy(self, name: str) -> paramiko.MissingHostKeyPolicy:
        """Return the policy of a name; the settings have been checked."""
        if name != "reject":
            return _POLICIES[name]()
        port = "" if self._port == _SSH_PORT else f"-p {self._port} "
        known = self._known_hosts
        file = "~/.ssh/known_hosts" if known is None else shlex.quote(known)
        return _Refuse(f"ssh-keyscan {port}{self._host} >> {file}")

    # -- the watchdog -----------------------------------------------------------------------------

    @contextmanager
    def _watching(self, client: paramiko.SSHClient, end: float) -> Iterator[None]:
        ticket = object()
        with self._changed:
            self._watched[ticket] = (end, client)
        try:
            yield
        finally:
            with self._changed:
                self._watched.pop(ticket, None)

    def _watch(self) -> None:
        nap_s = min(self._patience_s, self._connect_s) * _NAP_SHARE
        while not self._ended.wait(nap_s):
            now = time.monotonic()
            with self._changed:
                late = {client for end, client in self._watched.values() if end <= now}
            for client in late:
                client.close()


@final
class _Refuse(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko has no types
    """Refuses hosts that nobody vouches for.

    Args:
        remedy: The command that makes the host known.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def missing_host_key(
        self,
        client: paramiko.SSHClient,  # noqa: ARG002 - paramiko's signature
        hostname: str,
        key: paramiko.PKey,
    ) -> None:
        raise HostKeyError(
            f"the host key of {hostname!r} is not known ({key.get_name()}, "
            f"{key.fingerprint}). If it is the right one, add it: {self._remedy}; or name a file "
            "that has it as 'known_hosts' in 'storage_options'; or set 'host_key_policy' there to "
            "'auto_add' on a network that you trust"
        )


def _file_named(option: str, name: Any) -> str:
    """Return the path of a file that an option names.

    Raises:
        ConfigError: There is none.
    """
    if not isinstance(name, (str, Path)):
        raise ConfigError(
            f"{option!r} in 'storage_options' is a {type(name).__name__}; expected the name of a "
            "file",
            setting="storage_options",
        )
    # Without a home folder, '~' is a name like others.
    file = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises then
    if not file.exists() or file.is_dir():
        raise ConfigError(
            f"{option!r} in 'storage_options' names {str(file)!r}, and there is no such file",
            setting="storage_options",
        )
    return str(file)


def _quieten() -> None:
    """Keep out of the log what is raised as well: each lost connection would be a traceback."""
    logger = logging.getLogger("paramiko.transport")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


def _is_alive(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def _close(client: paramiko.SSHClient) -> None:
    """Close a connection and wait for the thread that serves it."""
    transport = client.get_transport()
    client.close()
    if transport is not None:
        transport.join(_END_S)
