"""Stands between the one who wants a server and the server: sees to it that nothing is left when either of them ends.

`python -m ebft_ds.sidecar.guard FD PARENT GRACE -- COMMAND...` runs the command in a session of its own. FD is one end of a socket pair:
the guard reports `started PID` and `ended STATUS` on it, and takes its end of file, like SIGTERM, as the order to stop. Then, and when
the command's first process ends by itself (vLLM's core and workers survive it), the whole process group and all descendants are ended.

Standard library only: it must be small, and start and act at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.2
SWEEP_SECONDS = 5.0
"""Longest time for what is left to vanish after SIGKILL."""
TRACKER_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1


class Guard:
    """One guarded command."""

    def __init__(self, link: socket.socket, parent: int, grace: float, command: list[str]) -> None:
        self._link = link
        self._parent = parent
        self._grace = grace
        self._command = command
        self._told_to_stop = False

    def run(self) -> int:
        """The exit status for `sys.exit`: the command's, 128 + n if signal n killed it."""
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # descendants whose parent dies become ours instead of vanishing from sight
        process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard)
        self._report(f"started {process.pid}")
        while process.poll() is None and not self._must_stop():
            pass
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._grace)
        for pid in _members(process.pid):
            if not _is_tracker(pid):
                _kill(pid)
        process.kill()
        status = process.wait()
        _wait_for_trackers(process.pid)
        _signal_group(process.pid, signal.SIGKILL)
        _sweep()
        if os.getppid() != self._parent:  # else the parent removes the folder that it made for the server
            with contextlib.suppress(OSError):
                os.rmdir(os.getcwd())
        self._report(f"ended {status}")
        return status if status >= 0 else 128 - status

    def _must_stop(self) -> bool:
        """Waits for one poll interval at most."""
        readable, _, _ = select.select([self._link], [], [], POLL_SECONDS)
        return (bool(readable) and self._link_closed()) or self._told_to_stop or os.getppid() != self._parent

    def _link_closed(self) -> bool:
        try:
            return not self._link.recv(64)
        except OSError:
            return True

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._told_to_stop = True

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self._link.sendall(f"{line}\n".encode())


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """Processes of a group."""
    found = []
    for entry in os.listdir("/proc") if sys.platform == "linux" else []:
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getpgid(int(entry)) == group:
                found.append(int(entry))
    return found


def _is_tracker(pid: int) -> bool:
    """Python's resource tracker: it ends by itself after the others, and removes the shared memory that they have left."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _wait_for_trackers(group: int) -> None:
    deadline = time.monotonic() + TRACKER_SECONDS
    while any(_is_tracker(pid) for pid in _members(group)) and time.monotonic() < deadline:
        if not _reap_one():
            time.sleep(0.02)


def _sweep() -> None:
    """Kill and reap all children, adopted ones included, until none is left."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline and (children := _children()):
        for child in children:
            _kill(child)
        if not _reap_one():
            time.sleep(0.02)


def _reap_one() -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    return False


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def main() -> int:
    descriptor, parent, grace, separator, *command = sys.argv[1:]
    if separator != "--" or not command:
        raise SystemExit("usage: guard FD PARENT GRACE -- COMMAND...")
    return Guard(socket.socket(fileno=int(descriptor)), int(parent), float(grace), command).run()


if __name__ == "__main__":
    sys.exit(main())
