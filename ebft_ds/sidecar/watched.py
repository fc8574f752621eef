"""Waiting for a server's answer no longer than the server takes connections.

When vLLM's engine core dies, the HTTP front stops to listen and then waits for its open connections to end, and a call into the dead core
never does: each would wait for the other until the caller's deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

A = TypeVar("A")

LOOK_SECONDS = 1.0
CONNECT_SECONDS = 3.0
REFUSALS = 3
"""In a row, until a server counts as shutting down."""


class ShutsDown(ConnectionError):
    """The server takes no connections any more, and has not answered."""


def refuses(url: str) -> bool:
    """Does it refuse a new connection? One that is only slow does not."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


async def watched(url: str, call: Coroutine[Any, Any, A]) -> A:
    """The call's result. Errors: ShutsDown; the call's own."""
    task = asyncio.ensure_future(call)
    refusals = 0
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=LOOK_SECONDS)
            if done:
                return task.result()
            refusals = refusals + 1 if await asyncio.to_thread(refuses, url) else 0
            if refusals >= REFUSALS and not task.done():
                raise ShutsDown(f"{url} takes no connections any more")
    finally:
        task.cancel()
