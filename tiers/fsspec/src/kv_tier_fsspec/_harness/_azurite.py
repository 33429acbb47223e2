"""A blob store with Azure's interface on loopback: Azurite, started and ended here."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from kv_conformance.harness import HarnessError

__all__ = ["AzuriteServer", "require_azurite"]

_START_S: Final = 60.0
_POLL_S: Final = 0.05
_ATTEMPTS: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_ACCOUNT: Final = "suite"
# No secret: the server is ours, on loopback, for a minute. 64 bytes, as Azure's are.
_KEY: Final = base64.b64encode(hashlib.sha512(b"kv-tier-fsspec").digest()).decode()

_VARIABLE: Final = "KV_TIER_FSSPEC_AZURITE"
_FOLDER: Final = Path("build/azurite")


def require_azurite() -> Path:
    """Return the program: named by the environment, of ``make azurite``, or on the path.

    Raises:
        HarnessError: It is missing.
    """
    named = os.environ.get(_VARIABLE)
    program = Path("node_modules", ".bin", "azurite-blob")
    folders = (Path.cwd(), *Path.cwd().parents, *Path(__file__).parents)
    for place in [named] if named else [folder / _FOLDER / program for folder in folders]:
        if Path(place).exists():
            # As it is named: it is a link, and looks for its modules where that points to.
            return Path(place).absolute()
    found = shutil.which("azurite-blob")
    if found is None:
        raise HarnessError(
            "the program 'azurite-blob' is missing. Run 'make azurite' (needs Node.js), or: npm "
            f"install azurite; and name its 'azurite-blob' with {_VARIABLE}"
        )
    return Path(found)


@final
class AzuriteServer:
    """One server with one account.

    Args:
        folder: Where its data lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def connection_string(self, port: int | None = None, key: str = _KEY) -> str:
        """Return what a client needs to know.

        Args:
            port: Another way to the server, a proxy for example.
            key: Another key than the account's.
        """
        return (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={key};"
            f"BlobEndpoint=http://127.0.0.1:{port or self.port}/{_ACCOUNT};"
        )

    def start(self) -> None:
        """Start it and wait until it answers. Again after :meth:`kill`: the same port and data.

        Raises:
            HarnessError: The program is missing, or does not come up.
        """
        program = require_azurite()
        self._folder.mkdir(parents=True, exist_ok=True)
        is_new = not self.port
        for _ in range(_ATTEMPTS if is_new else 1):
            if not self.port:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    self.port = free.getsockname()[1]
            with (self._folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the program was just found
                    [
                        *(str(program), "--silent", "--disableTelemetry", "--skipApiVersionCheck"),
                        *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
                        *("--location", str(self._folder)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"},
                    start_new_session=True,
                    preexec_fn=_end_with_parent,  # noqa: PLW1509 - only calls the kernel
                )
            if self._answers():
                return
            self.stop()
            if is_new:
                # Somebody else may have taken the port in the meantime.
                self.port = 0
        log_end = (self._folder / "server.log").read_text(errors="replace")[-1000:]
        raise HarnessError(
            f"Azurite does not answer within {_START_S:g} s; its log ends with:\n{log_end}"
        )

    def stop(self) -> None:
        """End it at once. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def freeze(self) -> None:
        """Stop it: nothing is answered any more, nobody is refused."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on. Idempotent."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        """Wait until it answers; ``False`` when it has ended, or takes too long."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process is not None:
            is_open = False
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                is_open = True
            if self._process.poll() is not None:
                break
            if is_open:
                return True
            time.sleep(_POLL_S)
        return False


def _end_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
