"""Inside the rollout process: messages in, loop and engine in the middle, groups, replies and heartbeats out.

Four threads. Reader: consumes the socket, ends the process at its end. Control (main): consumes the inbox, calls the loop, stages weights,
answers. Engine: see EngineDriver. Heartbeat: reports at a fixed pace whatever the others do, so that slow is told from dead.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec

from ebft_ds.errors import EbftError, RolloutError, WeightSyncError
from ebft_ds.rollout import messages
from ebft_ds.rollout.driver import EngineDriver
from ebft_ds.rollout.engine import RolloutEngine, VersionFollower, WeightReceiver, make_engine
from ebft_ds.rollout.loop import LoopContext, LoopHealth, RolloutLoop, load_loop
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.rollout.wire import Channel, ChannelClosed

LOOP_POLL_SECONDS = 0.02
"""How often a loop is asked for groups when nothing wakes the control thread."""

Inbox = queue.SimpleQueue[Callable[[], None] | None]


class RolloutHost:
    """Serves one client until Stop."""

    def __init__(self, channel: Channel, spec: RolloutProcessSpec) -> None:
        self._channel = channel
        self._spec = spec
        self._inbox: Inbox = queue.SimpleQueue()
        self._make_loop = load_loop(spec.rollout_loop, spec.rollout_loop_kwargs)
        self._engine: RolloutEngine = make_engine(spec)
        self._driver = EngineDriver(self._engine, notify=lambda: self._inbox.put(None))
        self._loop: RolloutLoop | None = None
        self._health = LoopHealth(progress=0, pending=0)
        self._stopping = False

    def serve(self) -> None:
        """Start everything, then dispatch until Stop. Whatever a loop or the engine raises comes out of here."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self._driver.start().result()
        self._loop = self._make_loop(self._context())
        self._loop.start()
        weights = self._engine.expected_weights() if isinstance(self._engine, WeightReceiver) else []
        self._channel.send(messages.Ready(self._engine.policy_version, self._engine.vocab_size, weights))
        while not self._stopping:
            self._cycle(self._loop)
        self._loop.stop()
        if self._driver.stop(timeout=2.0):
            self._engine.stop()

    def _cycle(self, loop: RolloutLoop) -> None:
        try:
            action = self._inbox.get(timeout=LOOP_POLL_SECONDS)
        except queue.Empty:
            action = None
        if action is not None:
            action()
        if self._driver.failure is not None:
            raise self._driver.failure
        groups = loop.groups()
        if groups:
            self._channel.send(messages.Groups(groups))
        self._health = loop.health()

    def _context(self) -> LoopContext:
        spec = self._spec
        return LoopContext(
            engine=self._driver,
            model_name_or_path=spec.model_name_or_path,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            dtype=spec.dtype,
            device=spec.device,
            batch_size=spec.batch_size,
            vocab_size=self._engine.vocab_size,
            seed=spec.seed,
        )

    def _read(self) -> None:
        try:
            while True:
                message, payload = self._channel.receive()
                if isinstance(message, messages.Stop) and self._loop is None:
                    os._exit(0)  # still loading: nothing to put in order
                self._inbox.put(functools.partial(self._handle, message, payload))
        except ChannelClosed:
            os._exit(0)  # rank 0 is gone or has dropped us: there is nobody to generate for
        except msgspec.MsgspecError as error:
            self._inbox.put(functools.partial(_fail, RolloutError(f"rank 0 sent a message that cannot be read: {error}")))

    def _beat(self) -> None:
        pause = threading.Event()
        try:
            while not pause.wait(self._spec.heartbeat_interval):
                servers = self._engine.servers() if isinstance(self._engine, VersionFollower) else None
                version, tokens = self._engine.policy_version, self._engine.tokens_generated
                self._channel.send(messages.Heartbeat(version, tokens, self._health, servers))
        except ChannelClosed:
            pass  # the reader sees it too and ends the process

    def _handle(self, message: Any, payload: bytearray) -> None:
        loop = self._loop
        assert loop is not None
        match message:
            case messages.Submit(requests=requests):
                loop.submit(requests)
            case messages.Cancel(indices=indices):
                loop.cancel(indices)
            case messages.BeginUpdate(id=id, manifest=manifest):
                self._answer_now(id, lambda: self._receiver.begin_update(manifest))
            case messages.Bucket(id=id, tensors=specs):
                self._answer_now(id, lambda: self._receive(specs, payload))
            case messages.AbortUpdate(id=id):
                self._answer_now(id, lambda: self._receiver.abort_update())
            case messages.FinishUpdate(id=id, version=version):
                self._answer_later(id, lambda: self._receiver.finish_update(version), then=lambda: loop.set_policy_version(version))
            case messages.ExpectVersion(id=id, version=version):
                self._answer_later(id, lambda: self._follower.expect_version(version))
            case messages.ConfirmVersion(id=id, version=version):
                self._answer_later(id, lambda: self._follower.confirm_version(version), then=lambda: loop.set_policy_version(version))
            case messages.Score(id=id, token_ids=token_ids, temperature=temperature):
                self._answer_later(id, lambda: self._receiver.score(token_ids, temperature))
            case messages.GetState(id=id):
                self._answer_now(id, loop.state_dict)
            case messages.LoadState(id=id, state=state):
                self._answer_now(id, lambda: loop.load_state_dict(state))
            case messages.Stop():
                self._stopping = True
            case _:
                raise RolloutError(f"unexpected message {message!r}")

    @property
    def _receiver(self) -> WeightReceiver:
        if isinstance(self._engine, WeightReceiver):
            return self._engine
        raise WeightSyncError(f"engine {self._spec.engine!r} takes no weights from the rollout process: push to the servers")

    @property
    def _follower(self) -> VersionFollower:
        if isinstance(self._engine, VersionFollower):
            return self._engine
        raise WeightSyncError(f"engine {self._spec.engine!r} has no servers: push its weights with begin_update")

    def _receive(self, specs: list[Any], payload: bytearray) -> None:
        from ebft_ds.rollout.tensors import from_bytes  # torch: not needed where weights never come this way

        try:
            tensors = from_bytes(specs, payload)
        except ValueError as error:
            raise WeightSyncError(f"a bucket of weights is damaged: {error}") from error
        self._receiver.receive(tensors)

    def _answer_now(self, id: int, work: Callable[[], Any]) -> None:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except EbftError as error:
            done.set_exception(error)
        self._answer(id, done)

    def _answer_later(self, id: int, work: Callable[[], Any], then: Callable[[], None] | None = None) -> None:
        """Run on the engine's thread; the answer, and `then` after success, come from the control thread again."""

        def finish(done: Future[Any]) -> None:
            if then is not None and done.exception() is None:
                then()
            self._answer(id, done)

        self._driver.call(work).add_done_callback(lambda done: self._inbox.put(lambda: finish(done)))

    def _answer(self, id: int, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._channel.send(messages.Reply(id, done.result()))
            return
        if not isinstance(error, EbftError):
            raise error
        if isinstance(error, WeightSyncError) and isinstance(self._engine, WeightReceiver):
            self._engine.abort_update()
        self._channel.send(messages.Refused(id, type(error).__name__, str(error)))


def _fail(error: RolloutError) -> NoReturn:
    raise error
