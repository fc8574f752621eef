"""The engine over vLLM servers: requests go out over HTTP from an event loop in a thread of its own; rank 0 updates the servers itself.

No torch in here: the process that hosts it is small.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ebft_ds.errors import ConfigError, ModelError, RolloutError
from ebft_ds.rollout.engine import ServerCounts
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.rollout.vllm_dispatch import Dispatcher
from ebft_ds.rollout.vllm_job import Job
from ebft_ds.rollout.vllm_request import check_request, describe
from ebft_ds.rollout.vllm_versions import VersionBook
from ebft_ds.sidecar.versions import VersionNames
from ebft_ds.types import RolloutGroup, RolloutRequest

STEP_SECONDS = 0.05
LOOP_SECONDS = 60.0
"""The event loop never blocks, but may have thousands of answers to read first."""
STOP_SECONDS = 10.0
OPEN_FILES = 65536
STALE_SHARE = 0.9
"""Of `timeout`: how long servers may hold other weights. The error that names them comes before the client's, which cannot."""


class VllmEngine:
    """RolloutEngine and VersionFollower over vLLM servers."""

    def __init__(self, spec: RolloutProcessSpec) -> None:
        if spec.vllm is None or not spec.vllm.servers:
            raise ConfigError("engine vllm needs spec.vllm with at least one server")
        self._spec = spec
        self._client = spec.vllm
        self._book = VersionBook(VersionNames(spec.vllm.run_token), spec.initial_version, adapter_alias=spec.vllm.adapter_alias)
        self._vocab_size: int | None = None
        self._tokens = 0
        self._open: dict[int, Job] = {}
        """By prompt index; the engine's thread alone."""
        self._changed = threading.Condition()
        self._finished: list[tuple[Job, RolloutGroup]] = []
        self._failure: BaseException | None = None
        self._dispatcher: Dispatcher | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-requests", daemon=True)

    @property
    def policy_version(self) -> int:
        return self._book.current

    @property
    def tokens_generated(self) -> int:
        return self._tokens + (self._dispatcher.signs_of_life if self._dispatcher is not None else 0)

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def vocab_size(self) -> int:
        if self._vocab_size is None:
            raise RolloutError("the vLLM engine is not started")
        return self._vocab_size

    def start(self) -> None:
        """Read the model's configuration and find the servers. They need not hold the run's weights yet: requests wait for that."""
        self._vocab_size = model_vocab_size(self._spec)
        _allow_many_connections()
        self._dispatcher = Dispatcher(
            self._client,
            self._book,
            vocab_size=self._vocab_size,
            patience=STALE_SHARE * self._spec.timeout,
            finish=self._finish,
            fail=self._fail,
        )
        self._loop.set_exception_handler(self._unforeseen)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._dispatcher.start(), self._loop).result()

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        dispatcher = self._started
        jobs: list[Job] = []
        for request in requests:
            check_request(request, vocab_size=self.vocab_size, max_model_len=dispatcher.max_model_len)
            if request.prompt.index in self._open:
                raise RolloutError(f"{describe(request)}: one is already in flight under this index")
            jobs.append(Job(request))
            self._open[request.prompt.index] = jobs[-1]
        self._on_loop(lambda: dispatcher.submit(jobs))

    def cancel(self, indices: Sequence[int]) -> None:
        dispatcher = self._started
        jobs = [self._open.pop(index) for index in indices if index in self._open]
        self._on_loop(lambda: dispatcher.cancel(jobs))

    def step(self) -> list[RolloutGroup]:
        """Groups that have come, waiting a moment for the first. Raises what has ended the engine."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished) or self._failure is not None, STEP_SECONDS)
            finished, self._finished = self._finished, []
            failure = self._failure
        if failure is not None:
            raise failure
        groups = [group for job, group in finished if self._open.get(group.prompt.index) is job]  # the others were cancelled meanwhile
        for group in groups:
            del self._open[group.prompt.index]
        return groups

    def expect_version(self, version: int) -> None:
        dispatcher = self._started
        self._on_loop(lambda: dispatcher.expect(version))

    def confirm_version(self, version: int) -> None:
        dispatcher = self._started
        self._on_loop(lambda: dispatcher.confirm(version))

    def servers(self) -> ServerCounts:
        if self._dispatcher is None:
            return ServerCounts(total=len(self._client.servers), usable=0, stale=0, unreachable=0)
        return self._dispatcher.counts()

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        if self._dispatcher is not None:
            with contextlib.suppress(TimeoutError):  # what is left open then, the end of the process closes
                asyncio.run_coroutine_threadsafe(self._dispatcher.stop(), self._loop).result(STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._open.clear()

    @property
    def _started(self) -> Dispatcher:
        if self._dispatcher is None:
            raise RolloutError("the vLLM engine is not started")
        return self._dispatcher

    def _on_loop(self, work: Callable[[], None]) -> None:
        """Run on the event loop and wait for it, so that calls take effect in their order."""

        async def run() -> None:
            work()

        try:
            asyncio.run_coroutine_threadsafe(run(), self._loop).result(LOOP_SECONDS)
        except TimeoutError as error:
            raise RolloutError(
                f"the vLLM engine's event loop has not answered for {LOOP_SECONDS:g} s; is the machine overloaded?"
            ) from error

    def _finish(self, job: Job) -> None:
        """Called on the event loop."""
        with self._changed:
            self._tokens += sum(len(rollout.token_ids) for rollout in job.rollouts)
            self._finished.append((job, job.group()))
            self._changed.notify()

    def _fail(self, error: BaseException) -> None:
        """Called on the event loop; the first failure counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()

    def _unforeseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback raised ends the engine instead of leaving a request behind."""
        loop.default_exception_handler(context)
        if (error := context.get("exception")) is not None:
            self._fail(error)


def model_vocab_size(spec: RolloutProcessSpec) -> int:
    """Ids that the model can produce, from its configuration. Raises ModelError if that cannot be read."""
    try:
        plain = _PlainConfig() if spec.trust_remote_code else msgspec.json.decode(_local_config(spec), type=_PlainConfig)
        if plain.vocab_size is not None and plain.text_config is None:
            return plain.vocab_size
    except (OSError, msgspec.MsgspecError):
        pass  # a hub name, or a configuration of another shape: the library knows
    from transformers import AutoConfig  # brings torch, which takes longer to load than everything else here

    try:
        config = AutoConfig.from_pretrained(spec.model_name_or_path, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
        return int(config.get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"rollout engine: cannot read the configuration of {spec.model_name_or_path!r}: {error}") from error


class _PlainConfig(msgspec.Struct):
    """config.json of a plain text model."""

    vocab_size: int | None = None
    text_config: dict[str, Any] | None = None


def _local_config(spec: RolloutProcessSpec) -> bytes:
    return Path(spec.model_name_or_path, "config.json").read_bytes()


def _allow_many_connections() -> None:
    """Every request in flight is an open file; the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
