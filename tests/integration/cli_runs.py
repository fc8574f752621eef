"""Starting `ebft-ds train` for real and watching it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Finished:
    code: int
    output: str


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}


def overrides(model: Path, data: tuple[Path, Path], output: Path, **fields: Any) -> list[str]:
    """A small LoRA run on two ranks; `fields` change it."""
    settings: dict[str, Any] = {
        "model_name_or_path": model,
        "train_dataset": data[0],
        "output_dir": output,
        "dtype": "float32",
        "use_peft": True,
        "lora_r": 4,
        "learning_rate": 1e-3,
        "max_seq_length": 96,
        "max_completion_length": 12,
        "ebft_adaptive_min_tokens": 8,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "num_processes": 2,
        "max_steps": 4,
        "log_samples_steps": 1,
        "export_final": False,
    }
    return [f"{key}={json.dumps(value) if not isinstance(value, (Path, str)) else value}" for key, value in (settings | fields).items()]


def start(recipe: Path, settings: list[str], command: str = "train", text: str = "run: {mode: async}\n") -> subprocess.Popen[str]:
    """`text`: the recipe, written first."""
    recipe.write_text(text, encoding="utf-8")
    arguments = [sys.executable, "-m", "ebft_ds.cli.app", command, str(recipe), *settings]
    return subprocess.Popen(
        arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run(recipe: Path, settings: list[str], timeout: float = 240.0, command: str = "train", text: str = "run: {mode: async}\n") -> Finished:
    process = start(recipe, settings, command, text)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        output, _ = process.communicate()
        raise AssertionError(f"not done after {timeout} s:\n{output[-4000:]}") from None
    return Finished(process.returncode, output)


def metrics(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 180.0, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} before {what}:\n{process.communicate()[0][-4000:]}")
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {timeout} s")
        time.sleep(0.1)


def tree(pid: int) -> list[psutil.Process]:
    """The process and everything below it; ranks and the rollout process have sessions of their own, but stay children."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rollout_process(pid: int) -> psutil.Process:
    return next(p for p in tree(pid) if "ebft_ds.rollout.process" in " ".join(p.cmdline()))


def end_tree(pid: int) -> None:
    for process in reversed(tree(pid)):
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def all_gone(processes: list[psutil.Process], timeout: float = 15.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def without(values: Mapping[str, Any], *prefixes: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith(prefixes)}
