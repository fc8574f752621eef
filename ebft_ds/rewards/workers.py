"""Reward functions in processes of their own: calls with a deadline, shared out in a fixed way, and errors that name the function."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ebft_ds.child_process import child_environment, exit_text
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.rewards.functions import CompletionTexts, RewardFunction, function_name, pickled_function

START_SECONDS = 120.0
"""For importing the modules of the functions; `reward_timeout` if that is longer."""


class RewardWorker:
    """One process, spawned with an interpreter of its own. It dies with the thread that made it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ebft_ds.rewards.worker_process", "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_it_ended(self) -> str:
        """In words; it has closed its connection."""
        try:
            return exit_text(self._process.wait(5.0))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def end(self) -> None:
        """Kill it and what its functions have started. May be called again."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


@dataclass
class _Share:
    """The completions of one worker, and how far it is with them."""

    worker: RewardWorker
    start: int
    end: int
    texts: CompletionTexts
    deadline: float = 0.0
    done: list[list[float]] = field(default_factory=list)
    """By function."""


class RewardFunctionPool:
    """Reward functions in `num_workers` processes.

    A batch is shared out by whole groups, worker w getting groups [w G / W, (w + 1) G / W) of the G groups; every worker calls all
    functions on its share, in their order. So with several workers a function sees a part of the batch, and has its state per worker.
    """

    def __init__(self, functions: Sequence[str | RewardFunction], num_workers: int, timeout: float) -> None:
        """
        Args:
            functions: `package.module:function`, or functions that can be pickled.
            timeout: seconds for one call of one function.

        Raises:
            ConfigError: a function that another process cannot have.
        """
        self.names = [function_name(function) for function in functions]
        self._sources = [function if isinstance(function, str) else pickled_function(function) for function in functions]
        self._num_workers = num_workers
        self._timeout = timeout
        self._workers: list[RewardWorker] = []

    def start(self) -> None:
        """Start the workers and load the functions in each. ConfigError if one cannot be loaded, or takes too long."""
        try:
            self._workers = [RewardWorker() for _ in range(self._num_workers)]
            deadline = time.monotonic() + max(self._timeout, START_SECONDS)
            for worker in self._workers:
                worker.connection.send(list(zip(self.names, self._sources, strict=True)))
            for worker in self._workers:
                self._await_ready(worker, deadline)
        except BaseException:
            self.close()
            raise

    def _await_ready(self, worker: RewardWorker, deadline: float) -> None:
        names = ", ".join(self.names)
        if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
            raise ConfigError(f"reward_funcs: loading {names} takes more than {max(self._timeout, START_SECONDS):g} s")
        try:
            problem = worker.connection.recv()
        except (EOFError, OSError):
            raise ConfigError(f"reward_funcs: the process that loads {names} died ({worker.how_it_ended()})") from None
        if problem is not None:
            raise ConfigError(problem)

    def call(self, texts: CompletionTexts, *, group_size: int = 1) -> list[list[float]]:
        """N rewards of each function, NaN where it gave none.

        Args:
            group_size: completions of one prompt; they go to one worker.

        Raises:
            DataError: a function raised, returned something else, hung or killed its process. The pool is closed then.
        """
        shares = self._shares(texts, group_size)
        try:
            for share in shares:
                self._send(share)
            while pending := [share for share in shares if len(share.done) < len(self.names)]:
                self._collect(pending)
        except BaseException:
            self.close()
            raise
        return [[reward for share in shares for reward in share.done[index]] for index in range(len(self.names))]

    def _shares(self, texts: CompletionTexts, group_size: int) -> list[_Share]:
        if len(texts) % group_size:
            raise ValueError(f"{len(texts)} completions are no whole groups of {group_size}")
        groups, count = len(texts) // group_size, len(self._workers)
        bounds = [groups * w // count * group_size for w in range(count + 1)]
        spans = zip(self._workers, bounds, bounds[1:], strict=False)
        return [_Share(worker, start, end, texts.part(start, end)) for worker, start, end in spans if end > start]

    def _send(self, share: _Share) -> None:
        """The share's next function."""
        share.deadline = time.monotonic() + self._timeout
        try:
            share.worker.connection.send((len(share.done), share.texts))
        except OSError:
            raise self._died(share) from None

    def _collect(self, pending: Sequence[_Share]) -> None:
        """What has been answered, and who is late."""
        left = min(share.deadline for share in pending) - time.monotonic()
        ready = wait([share.worker.connection for share in pending], max(0.0, left))
        for share in pending:
            if share.worker.connection in ready:
                self._take(share)
            elif time.monotonic() >= share.deadline:
                raise DataError(f"reward function {self._where(share)} has not returned within reward_timeout, {self._timeout:g} s")

    def _take(self, share: _Share) -> None:
        try:
            answer: tuple[list[float] | None, Any] = share.worker.connection.recv()
        except (EOFError, OSError):
            raise self._died(share) from None
        rewards, problem = answer
        if rewards is None:
            raise DataError(problem)
        share.done.append(rewards)
        if len(share.done) < len(self.names):
            self._send(share)

    def _died(self, share: _Share) -> DataError:
        return DataError(f"the process of reward function {self._where(share)} died: {share.worker.how_it_ended()}")

    def _where(self, share: _Share) -> str:
        return f"{self.names[len(share.done)]} (completions {share.start} to {share.end - 1} of the step)"

    def close(self) -> None:
        """End all workers. May be called again."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
