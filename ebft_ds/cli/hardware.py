"""What the machine has, found out without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

_DEVICE = re.compile(r"^nvidia\d+$")


def count_accelerators(devices: Path = Path("/dev")) -> int:
    """GPUs that the run may use: device files, limited by CUDA_VISIBLE_DEVICES; 0 under DS_ACCELERATOR=cpu."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    present = sum(1 for entry in os.listdir(devices) if _DEVICE.match(entry)) if devices.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    names = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return min(present, len(names)) if all(name.strip().isdigit() for name in names) else (len(names) if present else 0)


def visible_devices(devices: Path = Path("/dev")) -> list[str]:
    """Names of those GPUs, as CUDA_VISIBLE_DEVICES has them."""
    count = count_accelerators(devices)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    return [name for name in names if name and name != "-1"][:count]


def default_world_size(num_processes: int | None, accelerators: int) -> int:
    """Ranks that `ebft-ds train` starts: as asked, else one per GPU, else one."""
    return num_processes or max(1, accelerators)
