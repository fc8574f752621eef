"""Watching a training run whose rollouts come from vLLM servers: who its processes are, and which prompts it has trained on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.integration.cli_runs import metrics, overrides, samples

NAMES = {"api server": "APIServer", "engine core": "EngineCore", "worker": "Worker"}
"""What vLLM calls its processes; the API server's keeps its command line."""
GROUPS_PER_STEP = 2


def server_processes(run_folder: Path, index: int = 0) -> dict[str, psutil.Process]:
    """The server's live processes by role: the one whose command line holds its port, and its children by vLLM's names."""
    port = server_port(run_folder, index)
    front = next((p for p in psutil.process_iter(["cmdline"]) if _is_front(p, port)), None)
    if front is None:
        return {}
    found = {"api server": front}
    for process in _children(front):
        for role, name in NAMES.items():
            if name in _title(process):
                found[role] = process
    return found


def server_port(run_folder: Path, index: int = 0) -> int:
    """The port that the server's log names."""
    log = run_folder / "logs" / f"vllm_{index}.log"
    found = re.findall(r"--port (\d+)", log.read_text(errors="replace")) if log.exists() else []
    return int(found[-1]) if found else 0


def _is_front(process: psutil.Process, port: int) -> bool:
    line = process.info["cmdline"] or []
    return port > 0 and "vllm.entrypoints.openai.api_server" in line and "ebft_ds.sidecar.guard" not in line and str(port) in line


def _children(process: psutil.Process) -> Iterator[psutil.Process]:
    try:
        yield from process.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def trained_prompts(run_folder: Path) -> Counter[int]:
    """How often each prompt of the dataset was trained on (needs log_samples_steps=1)."""
    rows = {(row["step"], row["prompt_id"]) for row in samples(run_folder) if row["step"] > 0}
    return Counter(prompt for _, prompt in rows)


def vllm_settings(model: Path, data: tuple[Path, Path], output: Path, **fields: Any) -> list[str]:
    """A small run; `fields` say which servers."""
    return overrides(model, data, output, **({"vllm_max_num_seqs": 16, "vllm_kv_cache_memory_bytes": 2**26} | fields))


def assert_no_prompt_lost_or_twice(run_folder: Path, steps: int, rows: int = 48) -> None:
    """Every step has its full number of prompts, and no prompt comes again before all `rows` have had their turn."""
    counts = trained_prompts(run_folder)
    total = steps * GROUPS_PER_STEP
    assert sum(counts.values()) == total
    passes = total // rows
    assert set(counts.values()) <= {passes, passes + 1}
    assert passes == 0 or len(counts) == rows


def assert_pushed_and_probed(run_folder: Path, steps: int) -> None:
    """Every step ended with confirmed weights that compute what the trainer computes."""
    lines = [line for line in metrics(run_folder) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert line["policy_version"] == line["step"]
        assert line["sync/bytes"] > 0
        assert line["sync/probe_max_gap"] < 1e-3
