"""Starts the ranks of one machine, watches them, passes signals on, and ends all of them when one fails.

Every rank has its own session, so that Ctrl-C reaches it only through here, and dies with this process (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ebft_ds.cli.exit_code import RankEnd, job_exit_code, signal_name
from ebft_ds.cli.rank_output import RankOutput
from ebft_ds.errors import ConfigError, Preempted
from ebft_ds.train import EXIT_RECORD_VARIABLE

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Graces:
    """Seconds given to ranks."""

    own_end: float = 15.0
    """After another rank failed: to end by themselves, before SIGTERM."""
    after_save: float = 120.0
    """The same after a rank ended with the code for "preempted after saving"."""
    after_term: float = 10.0
    """After SIGTERM, before SIGKILL."""


class RankSupervisor:
    """Runs `command` once for every rank of this machine."""

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        *,
        master_port: int | None = None,
        environment: Mapping[str, str] | None = None,
        log_folder: Path | None = None,
        on_cpu: bool = True,
        graces: Graces | None = None,
    ) -> None:
        self._command = list(command)
        self._world_size = world_size
        self._port = usable_port(master_port)
        self._environment = dict(os.environ if environment is None else environment)
        self._log_folder = log_folder
        self._on_cpu = on_cpu
        self._graces = graces or Graces()
        self._ranks: dict[int, subprocess.Popen[str]] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._ends: list[RankEnd] = []
        self._deadline: float | None = None
        self._terminated = False
        self._stops = 0

    def run(self) -> int:
        """Start all ranks, wait for all of them, and return the job's exit code."""
        with tempfile.TemporaryDirectory(prefix="ebft_ds_exit_") as records:
            previous = self._install_handlers()
            try:
                for rank in range(self._world_size):
                    self._start(rank, records)
                self._read_outputs()  # after the last start: forking beside threads is asking for trouble
                if self._stops:
                    self._kill_all()  # a stop came in between: the ranks have nothing to save yet
                while self._ranks:
                    self._reap(Path(records))
                    self._end_stragglers()
                    time.sleep(_POLL_SECONDS)
            finally:
                self._kill_all()
                for number, handler in previous.items():
                    signal.signal(number, handler)
        return self._verdict()

    def _start(self, rank: int, records: str) -> None:
        owns_terminal = rank == 0
        process = subprocess.Popen(
            self._command,
            env=self._rank_environment(rank, records),
            stdin=subprocess.DEVNULL,
            stdout=None if owns_terminal else subprocess.PIPE,
            stderr=None if owns_terminal else subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._ranks[rank] = process

    def _read_outputs(self) -> None:
        for rank, process in self._ranks.items():
            if process.stdout is not None:
                self._outputs[rank] = RankOutput(rank, process.stdout, self._log_folder)

    def _rank_environment(self, rank: int, records: str) -> dict[str, str]:
        environment = dict(self._environment)
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_WORLD_SIZE=str(self._world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._port),
        )
        environment[EXIT_RECORD_VARIABLE] = records
        # One core is left for the rollout process.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (self._world_size + 1))))
        if self._on_cpu:
            environment.setdefault("DS_ACCELERATOR", "cpu")
        return environment

    def _install_handlers(self) -> dict[int, Any]:
        chosen = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        return {number: signal.signal(number, self._on_signal) for number in chosen}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """The first stop asks the ranks to save and end, the second kills them. SIGUSR1 is passed on and does not count as a stop."""
        if number == signal.SIGUSR1:
            self._signal_ranks(signal.SIGUSR1)
            return
        self._stops += 1
        if self._stops == 1:
            _say(f"{signal_name(number)}: the ranks save and stop; once more kills them")
            self._signal_ranks(signal.SIGTERM)
        else:
            self._kill_all()

    def _signal_ranks(self, number: int) -> None:
        for process in list(self._ranks.values()):
            process.send_signal(number)

    def _reap(self, records: Path) -> None:
        for rank, process in list(self._ranks.items()):
            status = process.poll()
            if status is None:
                continue
            del self._ranks[rank]
            _kill_group(process.pid)  # what the rank may have left behind
            end = _end_of(rank, status, records, ended_by_us=self._terminated or self._stops > 1)
            self._ends.append(end)
            if end.code != 0 and self._deadline is None and self._ranks:
                saved = end.code == Preempted.exit_code
                self._deadline = time.monotonic() + (self._graces.after_save if saved else self._graces.own_end)

    def _end_stragglers(self) -> None:
        """Once a rank has failed: SIGTERM to the others when their grace is over, then SIGKILL."""
        if self._deadline is None or time.monotonic() < self._deadline or not self._ranks:
            return
        if self._terminated:
            self._kill_all()
            return
        _say(f"rank(s) {', '.join(map(str, self._ranks))} did not end by themselves after another rank's failure: SIGTERM")
        self._terminated = True
        self._deadline = time.monotonic() + self._graces.after_term
        self._signal_ranks(signal.SIGTERM)

    def _kill_all(self) -> None:
        for process in list(self._ranks.values()):
            _kill_group(process.pid)

    def _verdict(self) -> int:
        code, reason = job_exit_code(self._ends)
        if code == 0:
            return 0
        told = {end.message for end in self._ends if end.rank == 0}
        for end in self._ends:
            output = self._outputs.get(end.rank)
            if end.code in (0, Preempted.exit_code) or end.ended_by_us or output is None or end.message in told - {""}:
                continue  # a message that all ranks have is shown once
            told.add(end.message)
            for line in output.tail():
                _say(f"[rank {end.rank}] {line}")
        for end in self._ends:
            if end.code < 0 and not end.ended_by_us:
                _say(f"rank {end.rank} was killed by {signal_name(-end.code)}")
        _say(f"exit code {code}: {reason}")
        return code


def _end_of(rank: int, status: int, records: Path, *, ended_by_us: bool) -> RankEnd:
    """The rank's own record counts before its exit status: it may have been killed while winding up."""
    record = records / f"rank_{rank}.json"
    if record.is_file():
        content = json.loads(record.read_text(encoding="utf-8"))
        if content["code"] != 0 or status == 0:
            return RankEnd(rank, int(content["code"]), str(content["message"]))
    return RankEnd(rank, status, ended_by_us=ended_by_us)


def usable_port(wanted: int | None) -> int:
    """The wanted port, or a free one. Errors: ConfigError if the wanted one is in use or not allowed."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise ConfigError(f"master_port {wanted} cannot be used: {error.strerror}; leave it out for a free one") from None
        port: int = probe.getsockname()[1]
        return port


def die_with_parent(parent: int) -> Callable[[], None]:
    """For `preexec_fn`: SIGKILL to the child when the process `parent` ends, however it ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it ended before the line above
                os._exit(1)

    return prepare


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
