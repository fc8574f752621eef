"""One vLLM server as a process: start, wait until it is ready, stop, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ebft_ds.errors import RolloutError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.command import ServerPlan, served_url, server_command
from ebft_ds.sidecar.ports import PortHold
from ebft_ds.sidecar.server_log import START_MARK, log_end

POLL_SECONDS = 0.25
PROBE_SECONDS = 5.0
FIRST_TOKEN_SECONDS = 60.0
KILL_SECONDS = 10.0
"""For the guard to sweep up after SIGKILL."""


@dataclass
class _Running:
    """Handles of one start."""

    guard: subprocess.Popen[bytes]
    link: socket.socket
    heard: str = ""

    def listen(self) -> None:
        """Take in what the guard has reported."""
        with contextlib.suppress(OSError):  # nothing there, or the guard is gone, or the link closed
            while data := self.link.recv(4096):
                self.heard += data.decode()

    def told(self, what: str) -> int | None:
        """The number in the guard's report `what N`; None if it has not come."""
        for line in self.heard.splitlines():
            word, _, number = line.partition(" ")
            if word == what:
                return int(number)
        return None


class ServerProcess:
    """A server on this machine. One thread uses it; another one may call `stop` at any time."""

    def __init__(
        self,
        plan: ServerPlan,
        log_path: Path,
        *,
        stop_grace: float = 10.0,
        environ: Mapping[str, str] | None = None,
        command: list[str] | None = None,
    ) -> None:
        """`environ`: what the server inherits from; `command`: executed instead of the plan's (tests).

        Errors: ConfigError for a port in use.
        """
        self._hold = PortHold(plan.host, plan.port)
        self.plan = msgspec.structs.replace(plan, port=self._hold.port)
        self.address = ServerAddress(served_url(self.plan, self._hold.port), plan.api_key)
        self.log_path = log_path
        self._grace = stop_grace
        self._environ = environ
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="ebft_ds_server_")
        self._running: _Running | None = None
        self._ready = False
        self._stopped = False
        self._lock = threading.Lock()
        """Held while a process is started or ended."""

    def start(self) -> None:
        """Start the process; it is not ready when this returns. After an end by itself it may be started again.

        Errors: RolloutError after `stop`.
        """
        with self._lock:
            if self._stopped:
                raise RolloutError(f"{self.name} has been stopped")
            if self._running is not None:
                self._bury(self._running)
            self._running = self._launch()
            self._ready = False

    def _launch(self) -> _Running:
        wanted = server_command(self.plan, self._environ)
        argv = self._command or wanted.argv
        ours, theirs = socket.socketpair()
        guard = [sys.executable, "-P", "-m", "ebft_ds.sidecar.guard", str(theirs.fileno()), str(os.getpid()), f"{self._grace:g}", "--"]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(self.log_path, "ab") as log:
            log.write(f"\n{START_MARK}{time.strftime('%F %T')} {shlex.join(argv)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                guard + argv,
                env=wanted.env,
                cwd=self._folder.name,  # empty: a file called like a module breaks vLLM's workers
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        return _Running(process, ours)

    def wait_ready(self, timeout: float) -> None:
        """Returns when the server samples. Errors: RolloutError with the log's end if it dies first or is too slow."""
        deadline = time.monotonic() + timeout
        asyncio.run(self._until_answers(deadline, timeout))
        self._ready = True

    async def _until_answers(self, deadline: float, timeout: float) -> None:
        api = VllmApi(self.address)
        try:
            while True:
                if self._stopped or not self.alive():
                    raise RolloutError(f"{self.name} ended while it started ({self.end_in_words()}); {self.log_tail()}")
                if await api.healthy(PROBE_SECONDS):
                    with contextlib.suppress(RolloutError):
                        await self._first_token(api, deadline)
                        return
                if time.monotonic() > deadline:
                    raise RolloutError(f"{self.name} was not ready after {timeout:g} s (vllm_server_start_timeout); {self.log_tail()}")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await api.close()

    async def _first_token(self, api: VllmApi, deadline: float) -> None:
        """A token at last: some models load and answer everything else, and kill the engine with the first forward."""
        await api.weight_version(PROBE_SECONDS)
        params = {"max_tokens": 1, "temperature": 1.0, "detokenize": False}
        timeout = min(max(PROBE_SECONDS, deadline - time.monotonic()), FIRST_TOKEN_SECONDS)
        await api.generate([0], params, request_id=f"ready-{time.monotonic_ns()}", model=None, timeout=timeout)

    @property
    def name(self) -> str:
        return f"vLLM server {self.address.url}"

    def alive(self) -> bool:
        """True while its first process runs; whether it answers is another question."""
        return self._running is not None and self._ended(self._running) is None

    def pid(self, timeout: float = 5.0) -> int | None:
        """Process and group id of the server's first process; None if it was not started."""
        running, deadline = self._running, time.monotonic() + timeout
        while running is not None and running.told("started") is None and running.guard.poll() is None and time.monotonic() < deadline:
            running.listen()
            time.sleep(0.01)
        return running.told("started") if running is not None else None

    def end_in_words(self) -> str:
        """How it ended."""
        status = self._ended(self._running) if self._running is not None else None
        if status is None:
            return "still running" if self._running is not None else "not started"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"

    def log_tail(self) -> str:
        """What its log says at the end, as the end of an error message."""
        return log_end(self.log_path)

    def stop(self) -> None:
        """End it: pending requests are aborted, then SIGTERM, then SIGKILL to the whole group. Takes three graces at most; idempotent."""
        self._stopped = True
        with self._lock:
            if self._running is not None:
                if self._ready and self.alive():
                    asyncio.run(self._abort_requests())
                self._bury(self._running)
            self._hold.close()
            self._folder.cleanup()

    async def _abort_requests(self) -> None:
        """A server with requests in flight may hang in SIGTERM."""
        api = VllmApi(self.address)
        with contextlib.suppress(RolloutError):  # it is ended anyway
            await api.pause("abort", timeout=self._grace)
        await api.close()

    def _bury(self, running: _Running) -> None:
        """End guard and server, and collect the guard."""
        if running.guard.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                running.guard.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.guard.wait(self._grace + KILL_SECONDS)
        running.listen()
        if running.told("ended") is None:  # the guard did not get to the end of its work
            self._kill(running)
        running.link.close()

    def _kill(self, running: _Running) -> None:
        pid = running.told("started")
        for kill, target in ((os.killpg, pid), (os.kill, running.guard.pid if running.guard.poll() is None else None)):
            if target is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(target, signal.SIGKILL)
        running.guard.wait()

    def _ended(self, running: _Running) -> int | None:
        """Exit status of the server's first process as subprocess reports it (negative: signal); None while it runs."""
        if running.guard.poll() is None:
            return None
        running.listen()
        told = running.told("ended")
        return told if told is not None else running.guard.returncode
