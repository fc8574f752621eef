"""Middleware of the servers we start: without the key nobody gets past /health.

vLLM's own --api-key guards the /v1, /v2, /inference routes alone, and leaves those open that pause the engine, replace its weights and
call any method in its workers. The server loads this (`--middleware ebft_ds.sidecar.auth.RequireKey`): standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "EBFT_VLLM_API_KEY"
"""Environment variable that holds the key: in the server's environment, and where a trainer attaches, in the trainer's."""
OPEN_PATHS = frozenset({"/health"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware. HTTP requests without `Authorization: Bearer <key>` get 401, websockets are closed."""

    def __init__(self, app: App, key: str | None = None) -> None:
        """`key`: default from the environment. Errors: RuntimeError without one, so that a server cannot come up unguarded."""
        found = os.environ.get(KEY_VARIABLE, "") if key is None else key
        if not found:
            raise RuntimeError(f"{KEY_VARIABLE} is not set, so the server's key is unknown")
        self._app = app
        self._expected = found.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] in OPEN_PATHS) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": "this server demands its key as a bearer token on every route but /health"}'
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._expected)
