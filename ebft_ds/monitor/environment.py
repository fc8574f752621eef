"""What a run was made with: versions, machine, code and command, for config.resolved.yaml and bug reports. Imports no torch."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "ebft-ds",
    "torch",
    "deepspeed",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "vllm",
    "flash-attn",
    "liger-kernel",
    "numpy",
    "pydantic",
    "msgspec",
    "tensorboard",
)


def environment_report(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Plain values that YAML and JSON can hold. A package that is not installed is left out."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_cores": os.cpu_count(),
        "gpus": gpu_names(),
        "packages": package_versions(),
        "code": code_version(Path(__file__).parent),
        "command": shlex.join(sys.argv if argv is None else argv),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a run's numbers, by distribution name."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def gpu_names(driver_dir: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Model names that the NVIDIA driver lists, in bus order; empty without one."""
    names = []
    for information in sorted(driver_dir.glob("*/information")):
        fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        names.append(fields.get("Model", "unknown").strip())
    return names


def code_version(folder: Path) -> dict[str, Any] | None:
    """Commit of the git checkout that `folder`'s files belong to, and whether it has changes; None if it is no checkout.

    A folder that merely lies inside somebody's repository (an installed package in a virtual environment) does not count.
    """
    tracked = _git(folder, "ls-files", "--error-unmatch", ".")
    commit = _git(folder, "rev-parse", "HEAD")
    if not tracked or not commit:
        return None
    return {"commit": commit, "modified": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if git or the repository is missing, or git does not answer in ten seconds."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
