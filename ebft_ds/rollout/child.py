"""The rollout process as an operating-system process: spawn, exit status, log tail, end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ebft_ds.child_process import child_environment, exit_text


class Child:
    """One spawned process in a session of its own."""

    def __init__(self, log_path: str, threads: int) -> None:
        """Spawn it. Must be called from a thread that outlives it: the kernel's parent-death signal follows the thread."""
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ebft_ds.rollout.process", "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs, self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(threads),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> str | None:
        """How it ended, in words; None while it runs."""
        code = self._process.poll()
        return None if code is None else exit_text(code)

    def wait(self, timeout: float) -> bool:
        """True if it has ended within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace: float) -> None:
        """Wait `grace` seconds for it to go by itself, then TERM, then KILL, each to the whole group. May be called again."""
        if not self.wait(grace):
            self._signal(signal.SIGTERM)
            self.wait(2.0)
        self._signal(signal.SIGKILL)  # also what a loop has left behind in the group
        self._process.wait()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that it wrote."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"(cannot read {self.log_path}: {error})"
        return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._process.pid, number)
