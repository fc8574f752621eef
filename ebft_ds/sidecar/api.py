"""The routes of one vLLM server that we use, typed; the only module that knows their names and payloads.

Every call has a deadline and checks the status and the shape of the answer. Nothing is retried: whether that is safe only the caller knows.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from ebft_ds.errors import RolloutError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.push_ops import METHOD, Op, Replies, Reply
from ebft_ds.sidecar.watched import ShutsDown, watched

A = TypeVar("A")
CONNECT_SECONDS = 5.0
BUSY_CONNECT_SECONDS = 60.0
"""For generation requests: thousands may want a connection at the same time."""
CONTROL_SECONDS = 30.0
TOKENS_METRIC = "vllm:iteration_tokens_total_sum"
"""Grows with every step of an engine core."""


class ServerUnreachable(RolloutError):
    """No connection, a connection that broke, or no answer in time. Whether the server acted on the request is unknown."""


class ServerRefused(RolloutError):
    """The server answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BadAnswer(RolloutError):
    """The server answered with something that is not what the route promises."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by weights labelled `version`."""

    version: str
    start: int
    end: int


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One completion of an answer."""

    index: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class GenerateAnswer(msgspec.Struct, frozen=True):
    choices: list[Choice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _WorldSize(msgspec.Struct):
    world_size: int


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _OpenApi(msgspec.Struct):
    paths: dict[str, Any]


class VllmApi:
    """One server. Use it from one event loop; `close` it there."""

    def __init__(self, address: ServerAddress, *, max_connections: int = 0) -> None:
        """`max_connections`: at once to this server; 0: no limit (requests queue in the server, not here)."""
        self.address = address
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Generation

    async def generate(
        self, token_ids: Sequence[int], sampling_params: dict[str, Any], *, request_id: str, model: str | None, timeout: float
    ) -> GenerateAnswer:
        """Tokens in, tokens out. `model`: an adapter's name, or None for the served model."""
        body = {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": sampling_params, "stream": False}
        if model is not None:
            body["model"] = model
        return await self._call("POST", "/inference/v1/generate", GenerateAnswer, timeout, body, connect=BUSY_CONNECT_SECONDS)

    async def prompt_logprobs(self, token_ids: Sequence[int], *, model: str | None = None, timeout: float = CONTROL_SECONDS) -> list[float]:
        """Log-probs of token_ids[1:], each given all before it, at temperature 1: [len - 1]."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self.generate(token_ids, params, request_id=f"probe-{id(token_ids):x}", model=model, timeout=timeout)
        entries = answer.prompt_logprobs or []
        if len(entries) != len(token_ids):
            raise BadAnswer(f"{self.address.url}: {len(entries)} prompt log-probs for {len(token_ids)} tokens")
        try:
            return [float((entry or {})[str(token)]["logprob"]) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]
        except (KeyError, TypeError) as error:
            raise BadAnswer(f"{self.address.url}: the prompt log-probs lack a prompt token: {error!r}") from error

    async def abort_all(self, timeout: float = CONTROL_SECONDS) -> None:
        await self._command("/abort_requests", timeout, {})

    # State

    async def healthy(self, timeout: float = CONTROL_SECONDS) -> bool:
        """True if the HTTP front answers; that the engine behind it lives is shown by `weight_version` alone."""
        try:
            await self._call("GET", "/health", None, timeout)
        except RolloutError:
            return False
        return True

    async def vllm_version(self, timeout: float = CONTROL_SECONDS) -> str:
        return (await self._call("GET", "/version", _Version, timeout)).version

    async def routes(self, timeout: float = CONTROL_SECONDS) -> set[str]:
        """Paths that the server offers."""
        return set((await self._call("GET", "/openapi.json", _OpenApi, timeout)).paths)

    async def models(self, timeout: float = CONTROL_SECONDS) -> dict[str, int | None]:
        """Names that requests may use (served model, adapters) -> context length where known."""
        return {m.id: m.max_model_len for m in (await self._call("GET", "/v1/models", _Models, timeout)).data}

    async def num_workers(self, timeout: float = CONTROL_SECONDS) -> int:
        """Worker processes that a broadcast must reach (tensor x pipeline x data parallel)."""
        return (await self._call("GET", "/get_world_size", _WorldSize, timeout)).world_size

    async def weight_version(self, timeout: float = CONTROL_SECONDS) -> str:
        return (await self._call("GET", "/weight_info", _WeightInfo, timeout)).weight_version

    async def tokens_processed(self, timeout: float = CONTROL_SECONDS) -> float | None:
        """Prompt and completion tokens that the engine has worked on since its start; None where the server keeps no statistics."""
        text = (await self._fetch("GET", "/metrics", timeout)).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith(TOKENS_METRIC)]
        try:
            return sum(float(line.split()[-1]) for line in lines) if lines else None
        except ValueError as error:
            raise BadAnswer(f"{self.address.url}/metrics: {error}") from error

    async def set_weight_version(self, name: str, timeout: float = CONTROL_SECONDS) -> None:
        """Label the weights that are there; moves nothing."""
        await self._command("/update_weight_version", timeout, {"new_version": name})

    # Weights

    async def pause(self, mode: Literal["keep", "abort"], timeout: float) -> None:
        """`keep`: requests in flight freeze and go on after `resume`, over a cache made anew."""
        await self._command(f"/pause?mode={mode}", timeout)

    async def resume(self, timeout: float) -> None:
        await self._command("/resume", timeout)

    async def init_transfer(self, info: dict[str, Any], timeout: float) -> None:
        await self._command("/init_weight_transfer_engine", timeout, {"init_info": info})

    async def shutdown_transfer(self, timeout: float) -> None:
        await self._command("/shutdown_weight_transfer_engine", timeout)

    async def start_update(self, timeout: float) -> None:
        await self._command("/start_weight_update", timeout)

    async def update(self, info: dict[str, Any] | list[dict[str, Any]], timeout: float) -> None:
        await self._command("/update_weights", timeout, {"update_info": info})

    async def finish_update(self, version_name: str | None, timeout: float) -> None:
        await self._command("/finish_weight_update", timeout, {"weight_version": version_name})

    async def push_op(self, op: Op, timeout: float) -> list[Reply]:
        """One op of a push to our receiver: the answers of the workers (with data parallelism, of the first engine's)."""
        body = {"method": METHOD, "args": [msgspec.json.encode(op).decode()]}
        return (await self._watched("/collective_rpc", self._call("POST", "/collective_rpc", Replies, timeout, body))).results

    async def sleep(self, level: int, timeout: float) -> None:
        await self._command(f"/sleep?level={level}", timeout)

    async def wake_up(self, timeout: float) -> None:
        await self._command("/wake_up", timeout)

    async def load_adapter(self, name: str, path: str, timeout: float) -> None:
        await self._command("/v1/load_lora_adapter", timeout, {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str, timeout: float) -> None:
        await self._command("/v1/unload_lora_adapter", timeout, {"lora_name": name})

    # Plumbing

    async def _command(self, path: str, timeout: float, body: dict[str, Any] | None = None) -> None:
        await self._watched(path, self._call("POST", path, None, timeout, body))

    async def _watched(self, path: str, call: Coroutine[Any, Any, A]) -> A:
        """A control call, given up when the server shuts down meanwhile."""
        try:
            return await watched(self.address.url, call)
        except ShutsDown as error:
            raise ServerUnreachable(f"{self.address.url}{path.partition('?')[0]}: {error}, and has not answered") from error

    async def _call(
        self, method: str, path: str, answer: type[A] | None, timeout: float, body: Any = None, *, connect: float = CONNECT_SECONDS
    ) -> A:
        """The decoded answer (None is returned where no shape is asked for)."""
        content = await self._fetch(method, path, timeout, body, connect=connect)
        if answer is None:
            return None  # type: ignore[return-value]
        try:
            return msgspec.json.decode(content, type=answer)
        except msgspec.MsgspecError as error:
            where = f"{self.address.url}{path.partition('?')[0]}"
            raise BadAnswer(f"{where}: an answer of another shape than expected ({error}): {_short(content)}") from error

    async def _fetch(self, method: str, path: str, timeout: float, body: Any = None, *, connect: float = CONNECT_SECONDS) -> bytes:
        """The body of an answer with status 200."""
        where = f"{self.address.url}{path.partition('?')[0]}"
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, connect))
        payload = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if payload is not None else {}
        try:
            async with self._open().request(method, self.address.url + path, data=payload, headers=headers, timeout=limits) as response:
                content = await response.read()
                status = response.status
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnreachable(f"{where}: no connection within {limits.sock_connect:g} s") from error
        except TimeoutError as error:
            raise ServerUnreachable(f"{where}: no answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"{where}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise ServerRefused(f"{where} answered {status}: {_short(content)}", status)
        return content

    def _open(self) -> aiohttp.ClientSession:
        """Made inside the event loop. Proxies of the environment are ignored for local addresses."""
        if self._session is None:
            key = self.address.api_key
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, limit_per_host=self._max_connections),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                trust_env=not self.address.is_local,
            )
        return self._session


def _short(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    return text if len(text) <= 1500 else f"{text[:1500]} ..."
