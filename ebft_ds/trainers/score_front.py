"""The HTTP side of the scorer, in a thread of its own: requests become work for rank 0's loop, which waits for nothing but that."""

from __future__ import annotations

import asyncio
import hmac
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ebft_ds.data.rows import BadRow
from ebft_ds.errors import ConfigError, EbftError
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.score_job import ScoreServer
from ebft_ds.trainers.score_request import BadRequest, RowsRequest, read_request
from ebft_ds.trainers.score_rounds import GroupIds

Encode = Callable[[Any], list[GroupIds]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

WAITING_REQUESTS = 256
"""More are turned away with 503."""
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Work:
    """One request's groups, and where their rewards go."""

    groups: list[GroupIds]
    answer: Future[list[list[float]]] = field(default_factory=Future)


class ScoreFront:
    """One thread takes work from it; requests are read and encoded in other ones."""

    def __init__(self, encode: Encode, server: ScoreServer, key: str | None, scale: RewardScale | None, facts: dict[str, Any]) -> None:
        """Listens when this returns. Errors: ConfigError for an address that cannot be had.

        Args:
            key: requests must bring it.
            scale: answers have normalised scores beside the raw ones.
            facts: what /health says beside its status.
        """
        self._encode, self._server, self._key = encode, server, key
        self._scale, self._facts = scale, facts
        self._work: queue.Queue[Work] = queue.Queue(WAITING_REQUESTS)
        self._encoder_thread = ThreadPoolExecutor(1, "encode")  # a tokenizer is not for several threads
        self._stopping = False
        self._open = 0
        """Requests that have not been answered."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=CLOSE_SECONDS)
        try:
            self.url = self._call(self._start())
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot listen on {server.host}, port {server.port or 'any'}: {error.strerror}") from None

    def take(self, groups: int, timeout: float) -> list[Work]:
        """What is waiting, up to about `groups` groups; waits for the first of it."""
        found: list[Work] = []
        try:
            found.append(self._work.get(timeout=timeout))
            while sum(len(work.groups) for work in found) < groups:
                found.append(self._work.get_nowait())
        except queue.Empty:
            pass
        return found

    def refuse(self) -> None:
        """From now on requests get 503."""
        self._stopping = True

    @property
    def idle(self) -> bool:
        """No request is being worked on."""
        return self._open == 0

    def close(self) -> None:
        """End all connections and the thread. Requests without an answer get 503."""
        self.refuse()
        while not self._work.empty():
            self._work.get_nowait().answer.set_exception(BadRequest(503, "the scorer ends"))
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._encoder_thread.shutdown(wait=False, cancel_futures=True)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._server.host, self._server.port or 0)
        await site.start()
        host, port = self._server.host, self._runner.addresses[0][1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json, self._require_key], client_max_size=int(self._server.max_body_mb * 2**20))
        app.add_routes([web.get("/health", self._health), web.post("/score", self._score)])
        return app

    @web.middleware
    async def _require_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        has_key = self._key is None or (scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), self._key.encode()))
        if request.path != "/health" and not has_key:
            return web.json_response(
                {"error": "this server demands its key as a bearer token"}, status=401, headers={"WWW-Authenticate": "Bearer"}
            )
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        status = "stopping" if self._stopping else "ok"
        return web.json_response({"status": status} | self._facts, status=503 if self._stopping else 200)

    async def _score(self, request: web.Request) -> web.Response:
        if self._stopping:
            raise BadRequest(503, "the scorer ends")
        body = await request.read()  # not counted as open: a slow sender must not keep the server up
        self._open += 1
        try:
            wanted = read_request(body, self._server.max_rows)
            groups = await asyncio.get_running_loop().run_in_executor(self._encoder_thread, self._encoded, wanted)
            work = Work([group for row in groups for group in row])
            self._enqueue(work)
            found: list[list[float]] = await asyncio.wrap_future(work.answer)
            rewards = iter(found)
            scores = [[score for _ in row for score in next(rewards)] for row in groups]
            return web.json_response(wanted.answer(scores, self._scale))
        finally:
            self._open -= 1

    def _encoded(self, wanted: RowsRequest) -> list[list[GroupIds]]:
        found = []
        for i, row in enumerate(wanted.rows):
            try:
                found.append(self._encode(row))
            except BadRow as error:
                raise BadRequest(400, f"row {i} {error}", i) from None
        return found

    def _enqueue(self, work: Work) -> None:
        try:
            self._work.put_nowait(work)
        except queue.Full:
            raise BadRequest(503, f"{WAITING_REQUESTS} requests are waiting already; try again later") from None


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        row = {} if error.row is None else {"row": error.row}
        return web.json_response({"error": str(error)} | row, status=error.status)
    except EbftError as error:  # of the scoring
        return web.json_response({"error": str(error)}, status=500)
    except web.HTTPException as error:  # of aiohttp: no such route, a body that is too large, ...
        return web.json_response({"error": error.text or error.reason}, status=error.status)
