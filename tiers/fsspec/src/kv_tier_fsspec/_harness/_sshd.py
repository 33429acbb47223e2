"""A real SSH server on loopback: OpenSSH, started and ended here.

It has a host key, a user's key and a configuration of its own in one folder, and lets in whoever
runs it, with that key alone. Should this process be killed, the kernel ends the server.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from kv_conformance.harness import HarnessError

__all__ = ["SshServer", "require_sshd"]

_START_S: Final = 20.0
_POLL_S: Final = 0.02
_ATTEMPTS: Final = 3
_PR_SET_PDEATHSIG: Final = 1

# Debian's sshd, run by root, wants this folder; its own unit makes it.
_PRIVILEGE_SEPARATION: Final = Path("/run/sshd")

_CONFIG: Final = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
# The folder is a temporary one, below one that everybody may write to.
StrictModes no
MaxStartups 100
MaxSessions {max_sessions}
UseDNS no
PrintMotd no
Subsystem sftp internal-sftp
"""


def require_sshd() -> Path:
    """Return the program.

    Raises:
        HarnessError: It is missing.
    """
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None or shutil.which("ssh-keygen") is None:
        raise HarnessError(
            "the programs 'sshd' and 'ssh-keygen' of OpenSSH are missing. Run: apt-get install "
            "openssh-server; nothing of it needs to be set up or running"
        )
    return Path(found)


@final
class SshServer:
    """One server, with SFTP for the user that runs it.

    Args:
        folder: Where its keys and its log lie; empty.
        max_sessions: How many sessions a connection may have; OpenSSH's own default is 10.

    Attributes:
        port: Where it listens, on loopback.
    """

    def __init__(self, folder: Path, max_sessions: int = 10) -> None:
        self._folder = folder
        self._max_sessions = max_sessions
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._process is not None

    @property
    def options(self) -> dict[str, Any]:
        """What a client needs to know, as ``storage_options``."""
        return {
            "port": self.port,
            "username": getpass.getuser(),
            "key_filename": str(self._folder / "user_key"),
            "known_hosts": str(self._folder / "known_hosts"),
            "look_for_keys": False,
            "allow_agent": False,
        }

    def start(self) -> None:
        """Start it and wait until it answers. Again after :meth:`stop`: the same port and keys.

        Raises:
            HarnessError: The program is missing, or does not come up.
        """
        sshd = require_sshd()
        if os.geteuid() == 0:
            _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        is_new = not self.port
        for _ in range(_ATTEMPTS if is_new else 1):
            self._prepare()
            with (self._folder / "sshd.log").open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the program was just found
                    [str(sshd), "-D", "-e", "-f", str(self._folder / "sshd_config")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,  # noqa: PLW1509 - only calls the kernel
                )
            if self._answers():
                return
            self.stop()
            if is_new:
                # Somebody else may have taken the port in the meantime.
                self.port = 0
        log_end = (self._folder / "sshd.log").read_text(errors="replace")[-1000:]
        raise HarnessError(
            f"sshd does not answer within {_START_S:g} s; its log ends with:\n{log_end}"
        )

    def stop(self) -> None:
        """Kill it and all sessions. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        sessions = _descendants(process.pid)
        process.kill()
        for session in sessions:
            _send(session, signal.SIGKILL)
        process.wait()

    def kill_sessions(self) -> int:
        """Kill the processes that serve connections; return how many there were."""
        sessions = _descendants(self._pid())
        for session in sessions:
            _send(session, signal.SIGKILL)
        return len(sessions)

    def freeze(self) -> None:
        """Stop it and all sessions: nothing is answered any more, nobody is refused."""
        for process in (self._pid(), *_descendants(self._pid())):
            _send(process, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all go on. Idempotent."""
        if self._process is not None:
            for process in (*_descendants(self._pid()), self._pid()):
                _send(process, signal.SIGCONT)

    def _pid(self) -> int:
        if self._process is None:
            raise HarnessError("the SSH server is not running")
        return self._process.pid

    def _prepare(self) -> None:
        if self.port:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("host_key", "user_key"):
            if (self._folder / name).exists():
                continue
            subprocess.run(  # noqa: S603
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)],  # noqa: S607
                check=True,
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        host_key = (self._folder / "host_key.pub").read_text().split()
        known = f"[127.0.0.1]:{self.port} {host_key[0]} {host_key[1]}\n"
        (self._folder / "known_hosts").write_text(known)
        user_key = (self._folder / "user_key.pub").read_text()
        (self._folder / "authorized_keys").write_text(user_key)
        config = _CONFIG.format(
            port=self.port, folder=self._folder, max_sessions=self._max_sessions
        )
        (self._folder / "sshd_config").write_text(config)

    def _answers(self) -> bool:
        """Wait until it answers; ``False`` when it has ended, or takes too long."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process is not None:
            answer = b""
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                answer = probe.recv(4)
            if self._process.poll() is not None:
                break
            if answer == b"SSH-":
                return True
            time.sleep(_POLL_S)
        return False


def _descendants(pid: int) -> list[int]:
    """Return the processes below one, those nearest to it first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                status = (entry / "stat").read_text(errors="replace")
                # The name of the program, in brackets, may hold anything.
                parent = int(status.rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(0), [])
        found += children
        todo += children
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
