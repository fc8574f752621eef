"""What our child processes have in common. Standard library only: a child is tied to its parent before it loads anything slow."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def tie_to_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`'s thread ends; if it ended before the call, leave now."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(0)


def leave_signals_to_parent() -> None:
    """A stop is rank 0's to handle: it saves first, then stops us. DeepSpeed's launcher and Slurm signal every descendant."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def child_environment(threads: int | None = None) -> dict[str, str]:
    """This rank's environment without its place in the job, and with its import path; `threads`: OMP_NUM_THREADS, default as here.

    PYTHONSAFEPATH keeps the working directory from shadowing library modules; it comes last on the path, for a user's own code.
    """
    env = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")}
    root = str(Path(__file__).resolve().parents[1])
    paths = dict.fromkeys([root, *(path for path in sys.path if path), os.getcwd()])
    env |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    return env if threads is None else env | {"OMP_NUM_THREADS": str(threads)}


def exit_text(code: int) -> str:
    """How a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
