"""The client's connection: a reader thread that takes in whatever comes, and waits that end when the process is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ebft_ds.errors import ConfigError, EbftError, ModelError, RolloutError, WeightSyncError
from ebft_ds.rollout import messages
from ebft_ds.rollout.child import Child
from ebft_ds.rollout.engine import ServerCounts
from ebft_ds.rollout.loop import LoopHealth
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.rollout.wire import Channel, ChannelClosed, ChannelTimeout
from ebft_ds.types import RolloutGroup, RolloutRequest

SILENCE_SECONDS = 30.0
CHECK_SECONDS = 0.25
"""Longest time between two looks at the process while waiting."""
FAREWELL_SECONDS = 2.0
"""How long to wait, after the connection broke, for the exit status."""
_ERRORS: dict[str, type[EbftError]] = {cls.__name__: cls for cls in (ConfigError, ModelError, RolloutError, WeightSyncError)}


class Link:
    """State shared between the reader thread and the callers, under one condition variable."""

    def __init__(self, child: Child, spec: RolloutProcessSpec) -> None:
        self.child = child
        self._spec = spec
        self._channel = Channel(child.socket, messages.FromProcess)
        self._changed = threading.Condition()
        self._ids = itertools.count(1)
        self._ready: messages.Ready | None = None
        self._failed: messages.Failed | None = None
        self._closed = False
        self._stopped = False
        self._lost: EbftError | None = None
        self._pending: set[int] = set()
        self._groups: list[RolloutGroup] = []
        self._awaited: dict[int, messages.Reply | messages.Refused | None] = {}
        self._health = LoopHealth(progress=0, pending=0)
        self._servers: ServerCounts | None = None
        self._progress: tuple[int, int] = (0, 0)
        self._last_sign = self._last_progress = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="rollout-client", daemon=True)
        self._reader.start()
        self._send(messages.Start(spec), spec.start_timeout)

    def wait_ready(self, timeout: float) -> messages.Ready:
        """The process's first message. Raises RolloutError after `timeout` seconds."""
        if not self._wait(lambda: self._ready is not None, timeout):
            raise self._lose(RolloutError(f"the rollout process was not ready after {timeout:g} s (rollout_start_timeout).{self._log()}"))
        assert self._ready is not None
        with self._changed:
            self._last_progress = time.monotonic()
        return self._ready

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, requests: list[RolloutRequest]) -> None:
        with self._changed:
            if not self._pending:
                self._last_progress = time.monotonic()
            self._pending.update(request.prompt.index for request in requests)
        self._send(messages.Submit(requests), self._spec.timeout)

    def cancel(self, indices: list[int]) -> None:
        with self._changed:
            self._pending.difference_update(indices)
            self._groups = [group for group in self._groups if group.prompt.index not in set(indices)]
        self._send(messages.Cancel(indices), self._spec.timeout)

    def poll(self, timeout: float) -> list[RolloutGroup]:
        self._wait(lambda: bool(self._groups), timeout)
        with self._changed:
            groups, self._groups = self._groups, []
        return groups

    def request(self, message: Any, timeout: float, payload: Sequence[memoryview] = ()) -> Any:
        """Send and wait for the answer.

        Raises what the process answered; if it did not within `timeout` seconds, WeightSyncError for a push, else RolloutError.
        """
        with self._changed:
            self._awaited[message.id] = None
        try:
            self._send(message, timeout, payload)
            if not self._wait(lambda: self._awaited[message.id] is not None, timeout):
                error = WeightSyncError if isinstance(message, messages.PartOfUpdate) else RolloutError
                raise error(f"the rollout process did not answer {type(message).__name__} within {timeout:g} s.{self._log()}")
            answer = self._awaited[message.id]
        finally:
            with self._changed:
                del self._awaited[message.id]
        if isinstance(answer, messages.Refused):
            raise _ERRORS.get(answer.error, RolloutError)(answer.message)
        assert answer is not None
        return answer.value

    def health(self) -> LoopHealth:
        self.check()
        with self._changed:
            return self._health

    def servers(self) -> ServerCounts | None:
        self.check()
        with self._changed:
            return self._servers

    def check(self) -> None:
        """Raise if the process is lost."""
        with self._changed:
            self._check()

    def stop(self, grace: float) -> None:
        """Ask it to stop, end it, close the connection. May be called again."""
        with self._changed:
            already, self._stopped = self._stopped, True
        if already:
            return
        try:
            self._channel.send(messages.Stop(), timeout=1.0)
        except (ChannelClosed, ChannelTimeout):
            grace = 0.0
        self.child.end(grace if self._lost is None else 0.0)
        self._channel.close()
        self._reader.join(2.0)

    def _send(self, message: Any, timeout: float, payload: Sequence[memoryview] = ()) -> None:
        self.check()
        try:
            self._channel.send(message, payload, timeout)
        except ChannelClosed:
            with self._changed:
                self._closed = True
                self._check()
        except ChannelTimeout as error:
            raise self._lose(
                RolloutError(f"the rollout process did not take {type(message).__name__} within {timeout:g} s.{self._log()}")
            ) from error

    def _wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """True when `done`, False after `timeout`; raises when the process is lost. What has arrived counts before the loss."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not done():
                self._check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, CHECK_SECONDS))
        return True

    def _check(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)
        if self._stopped:
            raise RolloutError("the rollout process was stopped")
        if self._failed is not None:
            error = _ERRORS.get(self._failed.error, RolloutError)
            name = "" if error is not RolloutError else f"{self._failed.error}: "
            raise self._lose(error(f"the rollout process failed: {name}{self._failed.message}\n{self._failed.traceback}"))
        if self._closed or self.child.exit_status() is not None:
            self._changed.wait_for(lambda: self._failed is not None, 0.0 if self._closed else CHECK_SECONDS)
            if self._failed is not None:
                self._check()
            self.child.wait(FAREWELL_SECONDS)
            status = self.child.exit_status() or "still running, but its connection is closed"
            raise self._lose(RolloutError(f"the rollout process is gone ({status}).{self._log()}"))
        self._check_silence()

    def _check_silence(self) -> None:
        now, limit = time.monotonic(), self._spec.timeout
        if self._ready is None:
            return
        # Heartbeats have a thread of their own: a process that misses them is frozen, however slow its work may be.
        quiet = min(limit, max(SILENCE_SECONDS, 40 * self._spec.heartbeat_interval))
        if now - self._last_sign > quiet:
            raise self._lose(RolloutError(f"no sign of life from the rollout process for {quiet:g} s.{self._log()}"))
        if self._pending and now - self._last_progress > limit:
            waiting = f"{len(self._pending)} prompts pending"
            raise self._lose(RolloutError(f"no progress in rollouts for {limit:g} s (rollout_timeout), {waiting}.{self._log()}"))

    def _lose(self, error: EbftError) -> EbftError:
        """Remember the loss and kill what is left: a process in an unknown state must not go on."""
        self._lost = error
        self.child.end(0.0)
        return error

    def _log(self) -> str:
        return f" Last lines of {self.child.log_path}:\n{self.child.log_tail()}"

    def _read(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                with self._changed:
                    self._take_in(message)
                    self._changed.notify_all()
        except ChannelClosed:
            pass
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _take_in(self, message: Any) -> None:
        self._last_sign = time.monotonic()
        match message:
            case messages.Heartbeat(tokens_generated=tokens, health=health, servers=servers):
                self._health, self._servers = health, servers
                if (tokens, health.progress) != self._progress:
                    self._progress = (tokens, health.progress)
                    self._last_progress = self._last_sign
                return
            case messages.Groups(groups=groups):
                self._groups += [group for group in groups if group.prompt.index in self._pending]
                self._pending.difference_update(group.prompt.index for group in groups)
            case messages.Reply(id=id) | messages.Refused(id=id):
                if id in self._awaited:
                    self._awaited[id] = message
            case messages.Ready():
                self._ready = message
            case messages.Failed():
                self._failed = message
        self._last_progress = self._last_sign
