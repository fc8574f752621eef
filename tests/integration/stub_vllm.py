"""A small HTTP server with vLLM's routes, for faults that a real server cannot be made to show. It answers by formula, not by a model."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from ebft_ds.sidecar.address import ServerAddress

VOCAB = 500
Answer = dict[str, Any]
Behaviour = Callable[["StubVllm", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Gate:
    """Opened from the test's thread; a thousand requests wait at it without a wake-up each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opened = asyncio.Event()

    def set(self) -> None:
        self._loop.call_soon_threadsafe(self._opened.set)

    async def wait(self) -> None:
        await self._opened.wait()


class StubVllm:
    """Serves from a thread of its own. Attributes may be set from the test at any time."""

    def __init__(self, version: str, *, max_model_len: int = 256) -> None:
        self.version = version
        self.max_model_len = max_model_len
        self.adapters: set[str] = set()
        self.requests: list[dict[str, Any]] = []
        """Bodies of the generation requests, in order of arrival."""
        self.next: deque[Behaviour] = deque()
        """What the next generation requests meet; afterwards `always`."""
        self.always: Behaviour = well
        self.look: Behaviour | None = None
        """Replaces the answer to /weight_info."""
        self.tokens: int | None = 0
        """The engine's count of tokens; None: no statistics."""
        self.in_flight = 0
        self.most_in_flight = 0
        self.broken_off = 0
        """Requests whose client went away before the answer."""
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self.gate = Gate(self._loop)
        """What `held` waits for."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="stub-vllm", daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.up()

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(f"http://127.0.0.1:{self._port}")

    def up(self) -> None:
        """Listen (again), on the same port."""
        self._run(self._up())

    def down(self) -> None:
        """Stop listening and break all connections, as a killed process does."""
        self._run(self._down())

    def close(self) -> None:
        if self._runner is not None:
            self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _up(self) -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=4096, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _down(self) -> None:
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        for site in list(self._runner.sites):
            await site.stop()
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        behaviour = self.next.popleft() if self.next else self.always
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await behaviour(self, request, body)
        except asyncio.CancelledError:
            self.broken_off += 1
            raise
        finally:
            self.in_flight -= 1

    async def _weight_info(self, request: web.Request) -> web.StreamResponse:
        if self.look is not None:
            return await self.look(self, request, {})
        return web.json_response({"weight_version": self.version})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        served = {"id": "model", "max_model_len": self.max_model_len}
        return web.json_response({"data": [served, *({"id": name} for name in sorted(self.adapters))]})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        counts = "" if self.tokens is None else f'vllm:iteration_tokens_total_sum{{engine="0"}} {float(self.tokens)}\n'
        return web.Response(text=f"# HELP\n{counts}other 1.0\n")


def good_answer(stub: StubVllm, body: dict[str, Any]) -> Answer:
    """n completions of max_tokens tokens, a function of prompt and seed."""
    params = body["sampling_params"]
    return {"request_id": body["request_id"], "choices": [_choice(stub.version, body, i) for i in range(params.get("n", 1))]}


def _choice(version: str, body: dict[str, Any], index: int) -> Answer:
    params = body["sampling_params"]
    length, seed = params["max_tokens"], params.get("seed", 0) + index
    tokens = [10 + (seed + sum(body["token_ids"]) + 7 * i) % (VOCAB - 10) for i in range(length)]
    return {
        "index": index,
        "token_ids": tokens,
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.01 * (token % 90) - 0.5} for token in tokens]},
        "weight_versions": [{"version": version, "start": 0, "end": length}],
    }


async def well(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As it should be."""
    return web.json_response(good_answer(stub, body))


async def reset(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Half an answer, then the connection breaks."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "10000"})
    await response.prepare(request)
    await response.write(b'{"choices": [{"index": 0, "token_ids": [')
    assert request.transport is not None
    request.transport.abort()
    return response


async def hang(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """No answer."""
    await asyncio.sleep(3600)
    raise AssertionError


async def held(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As it should be, once the stub's gate is open."""
    await stub.gate.wait()
    return await well(stub, request, body)


async def garbage(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text='{"choices": [{"index": 0, "tok', content_type="application/json")


def status(code: int) -> Behaviour:
    """An error status."""

    async def answer(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"the stub says {code}", "code": code}}, status=code)

    return answer


def altered(change: Callable[[Answer], None]) -> Behaviour:
    """A good answer with something wrong in it."""

    async def answer(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        found = copy.deepcopy(good_answer(stub, body))
        change(found)
        return web.json_response(found)

    return answer


def after(seconds: float) -> Behaviour:
    """A good answer that takes its time."""

    async def answer(stub: StubVllm, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await well(stub, request, body)

    return answer
