"""Where a container gets its credentials from, on loopback."""

from __future__ import annotations

import datetime as dt
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

if TYPE_CHECKING:
    from kv_tier_s3._harness import S3Access

__all__ = ["CredentialServer", "without_key"]


@final
class CredentialServer:
    """What a container gets its credentials from. A context manager.

    Attributes:
        access: Whose credentials it gives out; ``None`` for an error of its own.
        lifetime_s: How long it says they are valid.
        asked: How often it was asked.
    """

    def __init__(self) -> None:
        self.access: S3Access | None = None
        self.lifetime_s = 3600.0
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                access = outer.access
                if access is None:
                    self.send_error(500)
                    return
                end = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=outer.lifetime_s)
                body = json.dumps(
                    {
                        "AccessKeyId": access.access_key,
                        "SecretAccessKey": access.secret_key,
                        "Token": access.session_token or "",
                        "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                    }
                ).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            @override
            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/credentials"

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def without_key(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings that leave credentials to the chain."""
    secret = {"access_key_id", "secret_access_key", "session_token"}
    return {name: value for name, value in settings.items() if name not in secret}
