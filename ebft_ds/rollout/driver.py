"""The engine's thread: steps it while there is work, runs commands between two steps, collects finished groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ebft_ds.rollout.engine import RolloutEngine
from ebft_ds.types import RolloutGroup, RolloutRequest


class EngineDriver:
    """EngineAccess for loops, `call` for the process. Consumes commands, waits for either, unblocked by any; a failure ends the thread."""

    def __init__(self, engine: RolloutEngine, notify: Callable[[], None]) -> None:
        """`notify` is called from the engine's thread when groups are there, or when the thread has failed."""
        self.failure: BaseException | None = None
        self._engine = engine
        self._notify = notify
        self._changed = threading.Condition()
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._finished: list[RolloutGroup] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Future[None]:
        """Start the thread; the future is done when the engine is ready."""
        ready: Future[None] = self.call(self._engine.start)
        self._thread.start()
        return ready

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def tokens_generated(self) -> int:
        return self._engine.tokens_generated

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """One call is taken in whole between two steps, so equal calls make equal batches."""
        self.call(lambda: self._engine.submit(requests), fatal=True)

    def cancel(self, indices: Sequence[int]) -> None:
        gone = set(indices)

        def forget() -> None:
            self._engine.cancel(indices)
            with self._changed:
                self._finished = [group for group in self._finished if group.prompt.index not in gone]

        self.call(forget, fatal=True)

    def finished(self) -> list[RolloutGroup]:
        """Groups completed since the last call."""
        with self._changed:
            groups, self._finished = self._finished, []
        return groups

    def call(self, command: Callable[[], Any], *, fatal: bool = False) -> Future[Any]:
        """Run a command on the engine's thread between two steps. An exception goes to the future; `fatal`: it ends the thread as well."""
        future: Future[Any] = Future()
        with self._changed:
            self._commands.append((self._fatal(command) if fatal else command, future))
            self._changed.notify()
        return future

    def stop(self, timeout: float) -> bool:
        """End the thread after its current step; False if it did not within `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _fatal(self, command: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            try:
                return command()
            except BaseException as error:
                self.failure = error
                raise

        return run

    def _run(self) -> None:
        try:
            while self.failure is None:
                with self._changed:
                    while not (self._commands or self._stopping or self._engine.has_work):
                        self._changed.wait()
                    if self._stopping:
                        return
                    commands, self._commands = self._commands, []
                for command, future in commands:
                    _settle(command, future)
                if self.failure is None and self._engine.has_work:
                    self._collect(self._engine.step())
        except BaseException as error:  # noqa: BLE001 - reported by the process, which then ends
            self.failure = error
        finally:
            self._notify()

    def _collect(self, groups: list[RolloutGroup]) -> None:
        if groups:
            with self._changed:
                self._finished.extend(groups)
            self._notify()


def _settle(command: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(command())
    except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the future
        future.set_exception(error)
