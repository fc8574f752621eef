"""Names inside `output_dir/checkpoints`: what a finished, an unfinished and a doomed checkpoint folder are called.

step_40             finished: its manifest was written last, then the folder was renamed to this name
step_50.incomplete  being written, or left by a run that died while saving
step_40.replaced    a finished one moved aside while another save of the same step takes its name
step_30.deleting    on its way out
latest              text file with the newest finished name, for people and scripts; nothing here trusts it
"""

from __future__ import annotations

import re
from pathlib import Path

INCOMPLETE = ".incomplete"
REPLACED = ".replaced"
DELETING = ".deleting"
LATEST = "latest"
MANIFEST = "manifest.json"

_NAME = re.compile(r"step_(0|[1-9][0-9]*)")


def step_name(step: int) -> str:
    """Folder name of a step's finished checkpoint."""
    if step < 0:
        raise ValueError(f"a checkpoint's step is at least 0, not {step}")
    return f"step_{step}"


def step_of(path: Path) -> int | None:
    """Step in a finished checkpoint's folder name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def finished(root: Path) -> list[Path]:
    """Folders under `root` that carry a finished name, newest step first. Says nothing about their content."""
    if not root.is_dir():
        return []
    steps = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


def with_suffix(root: Path, suffix: str) -> list[Path]:
    """Folders `step_N<suffix>` under `root`, newest step first."""
    if not root.is_dir():
        return []
    steps = [
        (step, path)
        for path in root.iterdir()
        if path.name.endswith(suffix) and (step := step_of(path.with_name(path.name.removesuffix(suffix)))) is not None
    ]
    return [path for _, path in sorted(steps, reverse=True)]
