"""Requests waiting, requests in flight, and what becomes of them: sent to the freest usable server, checked, sent again where that is safe.

Sending a generation request again is always safe: it changes nothing on a server, and its seed makes the same completions (from the
same weights). What cannot be served at all ends in one error, which ends the run.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

from ebft_ds.errors import RolloutError
from ebft_ds.rollout.engine import ServerCounts
from ebft_ds.rollout.spec import VllmClientSpec
from ebft_ds.rollout.vllm_answer import UnusableAnswer, to_rollouts
from ebft_ds.rollout.vllm_deadlines import Deadlines
from ebft_ds.rollout.vllm_job import Job
from ebft_ds.rollout.vllm_request import describe, sampling_params
from ebft_ds.rollout.vllm_server import Server
from ebft_ds.rollout.vllm_versions import VersionBook
from ebft_ds.sidecar.api import BadAnswer, ServerRefused, ServerUnreachable, VllmApi
from ebft_ds.types import PolicyVersion

BUSY_STATUSES = frozenset({408, 425, 429, 503})
"""Too much at once, or not now."""
LOST_STATUSES = frozenset({401, 403, 500, 502, 504})
"""Something is wrong with the server, not with the request."""
GUARD_SECONDS = 0.25
CANCEL_SECONDS = 0.2


class Dispatcher:
    """Lives on one event loop; `counts` may be called from any thread.

    `finish` gets every job with its rollouts, `fail` the error that ends it all.
    """

    def __init__(
        self,
        spec: VllmClientSpec,
        book: VersionBook,
        *,
        vocab_size: int,
        patience: float,
        finish: Callable[[Job], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`patience`: seconds that servers which answer may hold other weights, or a push may last, while work is pending."""
        self.servers = [Server(VllmApi(address), book, cap=spec.max_concurrency, changed=self._pump) for address in spec.servers]
        self._spec = spec
        self._book = book
        self._vocab_size = vocab_size
        self._finish = finish
        self._fail = fail
        self._waiting: deque[Job] = deque()
        self._jobs: set[Job] = set()
        """Everything unfinished: waiting, in flight, or pausing before another attempt."""
        self._answers = 0
        self._deadlines = Deadlines(unreachable=spec.reconnect_timeout, unusable=patience, now=time.monotonic())
        self._tasks: list[asyncio.Task[None]] = []

    # State

    @property
    def max_model_len(self) -> int | None:
        """Of the server with the shortest context; None before any has answered."""
        return min((server.max_model_len for server in self.servers if server.max_model_len is not None), default=None)

    @property
    def signs_of_life(self) -> int:
        """Grows with every look that finds a server alive with requests in flight."""
        return sum(server.signs_of_life for server in self.servers)

    def counts(self) -> ServerCounts:
        states = [server.state for server in self.servers]
        return ServerCounts(
            total=len(states),
            usable=states.count("usable"),
            stale=states.count("stale"),
            unreachable=states.count("unreachable"),
            outstanding=sum(server.in_flight for server in self.servers),
        )

    # From the engine

    async def start(self) -> None:
        """Look at every server once, then keep watching. Raises RolloutError if none answers."""
        deadline = time.monotonic() + self._spec.reconnect_timeout
        while True:
            await asyncio.gather(*(server.look() for server in self.servers))
            if any(server.state != "unreachable" for server in self.servers):
                break
            if time.monotonic() > deadline:
                raise RolloutError(f"no vLLM server answers after {self._spec.reconnect_timeout:g} s. {self._describe_servers()}")
            await asyncio.sleep(GUARD_SECONDS)
        self._tasks = [asyncio.create_task(server.watch()) for server in self.servers]
        self._tasks.append(asyncio.create_task(self._guard()))
        for task in self._tasks:
            task.add_done_callback(self._supervise)

    async def stop(self) -> None:
        """Give up everything; the servers see closed connections and drop their requests."""
        for job in self._jobs:
            job.dropped = True
        pending = {*self._tasks, *(job.task for job in self._jobs if job.task is not None)}
        while pending:  # a cancellation that meets the end of a wait can get lost
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
        for server in self.servers:
            await server.api.close()

    def submit(self, jobs: Sequence[Job]) -> None:
        self._jobs.update(jobs)
        self._waiting.extend(jobs)
        self._pump()

    def cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.dropped = True
            self._jobs.discard(job)
            if job.task is not None:
                job.task.cancel()

    def expect(self, version: PolicyVersion) -> None:
        self._book.expect(version)
        self._deadlines.push_began(time.monotonic())

    def confirm(self, version: PolicyVersion) -> None:
        self._book.confirm(version)
        self._deadlines.push_ended(time.monotonic())
        for server in self.servers:
            server.look_soon()
        self._pump()

    # Sending

    def _pump(self) -> None:
        """Send what can be sent, in order."""
        while self._waiting:
            if self._waiting[0].dropped:
                self._waiting.popleft()
                continue
            free = [(server, held) for server in self.servers if server.has_room and (held := server.held) is not None]
            if not free:
                return
            server, held = min(free, key=lambda pair: pair[0].samples)
            self._send(self._waiting.popleft(), server, held)

    def _send(self, job: Job, server: Server, asked: PolicyVersion) -> None:
        task: asyncio.Task[None] = asyncio.create_task(self._ask(job, server, asked))
        job.enter(server, task)
        task.add_done_callback(functools.partial(self._settle, job, server, server.in_flight, time.monotonic()))

    async def _ask(self, job: Job, server: Server, asked: PolicyVersion) -> None:
        """One attempt: `job.rollouts` are there afterwards."""
        request, oldest = job.request, self._book.current
        answer = await server.api.generate(
            request.prompt.token_ids,
            sampling_params(request, vocab_size=self._vocab_size),
            request_id=f"{self._spec.run_token}-{request.prompt.index}-{request.attempt}-{job.sends}",
            model=self._book.model(asked),
            timeout=self._spec.request_timeout,
        )
        job.rollouts = to_rollouts(
            answer,
            request,
            vocab_size=self._vocab_size,
            version_of=lambda name: self._book.taken(name, asked=asked, oldest=oldest),
        )

    def _settle(self, job: Job, server: Server, in_flight: int, sent_at: float, task: asyncio.Task[None]) -> None:
        """An attempt is over: a group, another attempt later, or the end of it all."""
        job.leave()
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._again(job, RolloutError(f"{server.url} has been silent: {server.last_error}"))
        elif error is None:
            self._answers += 1
            server.succeeded(in_flight, time.monotonic() - sent_at, max(len(rollout.token_ids) for rollout in job.rollouts))
            if not job.dropped:
                self._jobs.discard(job)
                self._finish(job)
        elif isinstance(error, RolloutError):
            self._judge(job, server, error, sent_at)
        else:
            self._fail(error)
        self._pump()

    # Failing

    def _judge(self, job: Job, server: Server, error: RolloutError, sent_at: float) -> None:
        """What a failed attempt says about the server, about the request, and what happens next."""
        match error:
            case ServerRefused(status=status) if status in BUSY_STATUSES:
                server.pacer.overloaded()
                server.failed(error, sent_at=sent_at)
            case ServerRefused(status=404) if self._book.uses_adapters:
                server.failed(error, sent_at=sent_at)  # without the adapter; the next look says so
            case ServerRefused(status=status) if status not in LOST_STATUSES:
                self._fail(RolloutError(f"{describe(job.request)}: the server refuses it: {error}{_hint(status)}"))
                return
            case ServerUnreachable() if time.monotonic() - sent_at >= self._spec.request_timeout:
                server.hangs(error, sent_at=sent_at)
            case ServerRefused() | ServerUnreachable() | BadAnswer() | UnusableAnswer():
                server.failed(RolloutError(f"{server.url}: {error}") if isinstance(error, UnusableAnswer) else error, sent_at=sent_at)
            case _:
                self._fail(error)
                return
        self._again(job, error)

    def _again(self, job: Job, error: RolloutError) -> None:
        """Another attempt after a pause, unless there were too many."""
        if job.dropped:
            return
        job.failed(self._answers)
        if job.hopeless(self._spec.request_retries):
            what = f"{describe(job.request)}: {job.failures} attempts failed (vllm_request_retries={self._spec.request_retries})"
            self._fail(RolloutError(f"{what}; the last: {error}. {self._describe_servers()}"))
            return
        asyncio.get_running_loop().call_later(job.pause, self._requeue, job)

    def _requeue(self, job: Job) -> None:
        if not job.dropped:
            self._waiting.appendleft(job)
            self._pump()

    # Watching

    async def _guard(self) -> None:
        """Deadlines: servers that are silent lose their requests, and work without any usable server ends the run."""
        while True:
            await asyncio.sleep(GUARD_SECONDS)
            self._pump()  # a pause after a failure may be over
            now = time.monotonic()
            if not self._deadlines.pushing(now):
                self._give_up_silent(now)
            states, answered = [server.state for server in self.servers], max(server.last_answer for server in self.servers)
            overdue = self._deadlines.overdue(states, pending=bool(self._jobs), now=now, answered_at=answered)
            if overdue is not None:
                self._fail(RolloutError(f"{overdue}, with {len(self._jobs)} prompts pending. {self._describe_servers()}"))

    def _give_up_silent(self, now: float) -> None:
        """What hangs at a server that answers nothing goes to the others."""
        for server in self.servers:
            if server.in_flight and now - server.last_answer > self._spec.reconnect_timeout:
                for job in self._jobs:
                    if job.server is server and job.task is not None:
                        job.task.cancel()

    def _describe_servers(self) -> str:
        return "; ".join(server.describe() for server in self.servers)

    def _supervise(self, task: asyncio.Task[None]) -> None:
        """A watcher never ends by itself: what nobody foresaw ends the engine."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


def _hint(status: int) -> str:
    return "; start the server with --enable-scale-out, which offers this route" if status == 404 else ""
