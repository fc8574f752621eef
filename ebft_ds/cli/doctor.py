"""`ebft-ds doctor`: is this machine ready? Advice for what is not."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_ds.cli.hardware import count_accelerators

TESTED = {
    "torch": "2.13",
    "transformers": "5.19",
    "deepspeed": "0.19.8",
    "peft": "0.21",
    "datasets": "5.2",
    "safetensors": "0.8",
    "tensorboard": "2.21",
    "pydantic": "2.14",
    "typer": "0.29",
    "rich": "15",
    "msgspec": "0.23",
    "psutil": "7",
    "numpy": "2",
}
"""Package -> version prefix that the tests ran with."""

State = Literal["ok", "note", "bad"]
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: State
    subject: str
    text: str
    advice: str = ""


def doctor(output_dir: Annotated[Path, typer.Option(help="Where runs will be written.")] = Path()) -> None:
    """Check versions, hardware, disk, compiler and caches; exit code 2 if something will not work."""
    findings = [*check_python(), *check_packages(), *check_vllm(), *check_hardware(), *check_disk(output_dir), *check_compiler()]
    table = Table()
    for heading in ("", "what", "found", "advice"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.state), Text(finding.subject), Text(finding.text), Text(finding.advice))
    Console().print(table)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(2)


def check_python() -> Iterator[Finding]:
    """Python 3.11 or newer."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("ok" if good else "bad", "python", version, "" if good else "install Python 3.11")


def check_packages() -> Iterator[Finding]:
    """Installed versions against the tested ones."""
    for name, tested in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("bad", name, "missing", f"pip install '{name}=={tested}.*'")
            continue
        if version == tested or version.startswith(tested + "."):
            yield Finding("ok", name, version)
        else:
            yield Finding("note", name, version, f"tested with {tested}")


def check_vllm() -> Iterator[Finding]:
    """vLLM is optional; if it is there, its version, kind and our entry point count."""
    from ebft_ds.sidecar.supported import PLUGIN_GROUP, TESTED, how_to_install, installed_vllm

    found, on_cpu = installed_vllm(), count_accelerators() == 0
    if found is None:
        yield Finding("ok", "vllm", "not installed", f"optional, the embedded engine is used; {how_to_install(on_cpu)}")
        return
    text = f"{found.distribution} {found.version}"
    if found.is_tested:
        yield Finding("ok", "vllm", text)
    else:
        yield Finding("note", "vllm", text, f"servers are refused: tested with {TESTED}.*; {how_to_install(on_cpu)}")
    if found.is_cpu_build != on_cpu:
        yield Finding("note", "vllm build", "CPU" if found.is_cpu_build else "GPU", f"servers cannot start here; {how_to_install(on_cpu)}")
    subject = f"entry point in {PLUGIN_GROUP}"
    yield Finding("ok", subject, "found") if found.has_plugin else Finding("note", subject, "missing", "pip install -e . in the checkout")


def check_hardware() -> Iterator[Finding]:
    """GPUs, cores and memory, and how many ranks `train` would start."""
    gpus, cores = count_accelerators(), os.cpu_count() or 1
    yield Finding("ok", "GPUs", str(gpus), "" if gpus else "runs on the CPU over gloo; use dtype: float32")
    yield Finding("ok" if cores > 1 else "note", "cores", str(cores), "" if cores > 1 else "ranks and rollouts will share one core")
    yield Finding("ok", "ranks by default", str(max(1, gpus)), "num_processes changes it")
    free = psutil.virtual_memory().available
    yield Finding(
        "ok" if free > 4 * _GIB else "note", "free memory", f"{free / _GIB:.1f} GiB", "" if free > 4 * _GIB else "small models only"
    )
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).free < _GIB // 4:
        yield Finding("note", "/dev/shm", "below 256 MiB free", "in a container, start it with --shm-size")


def check_disk(output_dir: Path) -> Iterator[Finding]:
    """Free space where runs are written."""
    place = output_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    state: State = "ok" if free > 10 * _GIB else "note"
    yield Finding(state, f"disk at {place}", f"{free / _GIB:.1f} GiB free", "" if state == "ok" else "checkpoints may not fit")
    yield writable(place, f"writing in {place}", "choose another output_dir")


def check_compiler() -> Iterator[Finding]:
    """What DeepSpeed needs to build its ops at the first start."""
    for program, package in (("g++", "g++"), ("ninja", "ninja-build")):
        found = shutil.which(program)
        if found is None and program == "ninja":
            beside = Path(sys.executable).parent / "ninja"
            found = str(beside) if beside.exists() else None
        yield Finding("ok" if found else "bad", program, found or "missing", "" if found else f"apt-get install {package}")
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    place = cache
    while not place.exists():
        place = place.parent
    yield writable(place, f"torch extension cache {cache}", "set TORCH_EXTENSIONS_DIR to a folder that can be written")


def writable(folder: Path, subject: str, advice: str) -> Finding:
    """Can a file be made in `folder`?"""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Finding("ok", subject, "works")
    except OSError as error:
        return Finding("bad", subject, str(error.strerror), advice)
