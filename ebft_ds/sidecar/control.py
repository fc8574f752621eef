"""Blocking access to the asynchronous API, for rank 0's main thread: one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import VllmApi

T = TypeVar("T")


class ControlLoop:
    """Runs coroutines on a background event loop. The APIs made by `api` belong to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-control", daemon=True)
        self._thread.start()
        self._apis: dict[str, VllmApi] = {}

    def api(self, address: ServerAddress) -> VllmApi:
        """The one API object for this server."""
        if address.url not in self._apis:
            self._apis[address.url] = VllmApi(address)
        return self._apis[address.url]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; its own deadlines bound the wait."""
        future = self.start(work)
        while True:
            try:
                return future.result(1.0)
            except TimeoutError:
                if future.done():  # the work's own
                    raise
                if not self._thread.is_alive():  # closed meanwhile: nobody would ever answer, and the interpreter's end would wait
                    future.cancel()
                    raise RuntimeError("the control loop was closed before the servers had answered") from None

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """The coroutine's result, later."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def each(self, addresses: Sequence[ServerAddress], work: Callable[[VllmApi], Awaitable[T]]) -> list[T | BaseException]:
        """`work` on every server at once: results or exceptions, in the order of `addresses`."""
        apis = [self.api(address) for address in addresses]

        async def together() -> list[T | BaseException]:
            return list(await asyncio.gather(*(work(api) for api in apis), return_exceptions=True))

        return self.run(together())

    def close(self) -> None:
        """May be called twice."""
        if not self._thread.is_alive():
            return

        async def close_all() -> None:
            for api in self._apis.values():
                await api.close()

        self.run(close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
