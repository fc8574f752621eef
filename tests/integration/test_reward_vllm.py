"""One reward model, four ways to its scores: transformers, `ebft-ds score`, its server, and a real vLLM pooling server on the CPU."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.sidecar.server import ServerProcess
from tests.integration.reward_models import make_reward_model, rows, scores_of_transformers, token_ids
from tests.integration.test_score import ask, close, read, run, serving, write
from tests.integration.vllm_server import KEY, START_SECONDS, tiny_plan


def vllm(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{route}", json.dumps(body).encode(), headers), timeout=120) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]
    return found


def answers(url: str) -> bool:
    try:
        return bool(vllm(url, "classify", {"input": [5, 6]}))
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def pooling_server(model: Path, log: Path) -> Iterator[str]:
    """URL of a vLLM server that scores. `ServerProcess.wait_ready` would wait for a token, which such a server never gives."""
    server = ServerProcess(tiny_plan(model, weight_transfer=None, extra_args=("--runner", "pooling")), log, stop_grace=5.0)
    deadline = time.monotonic() + START_SECONDS
    try:
        server.start()
        while not answers(server.address.url):
            assert server.alive(), server.log_tail()
            assert time.monotonic() < deadline, server.log_tail()
            time.sleep(0.5)
        yield server.address.url
    finally:
        server.stop()


@pytest.mark.timeout(900)
def test_scores_are_the_same_however_they_are_asked_for(tmp_path: Path) -> None:
    model = make_reward_model(tmp_path / "model", head_dim=32)  # vLLM's attention on the CPU knows no smaller heads
    data = rows(18, seed=3)
    sequences = token_ids(model, data)
    wanted = scores_of_transformers(model, sequences)
    output = tmp_path / "scores.jsonl"
    done = run(model, "--input", write(tmp_path / "rows.jsonl", data), "--output", output, "--processes", 2)
    assert done.code == 0, done.output[-3000:]
    worst = {"ebft-ds score": close([line["scores"] for line in read(output)], wanted)}
    with serving(model, tmp_path / "log") as (url, _):
        worst["ebft-ds score --serve"] = close(ask(url, {"rows": data})["scores"], wanted)
    flat = [ids for row in sequences for ids in row]
    expected = [[score for row in wanted for score in row]]
    with pooling_server(model, tmp_path / "vllm.log") as url:
        classified = vllm(url, "classify", {"input": flat, "use_activation": False})
        worst["vLLM /classify"] = close([[score for found in classified for score in found["probs"]]], expected, 1e-3)
        pooled = vllm(url, "pooling", {"input": flat, "task": "classify", "use_activation": False})
        worst["vLLM /pooling"] = close([[score for found in pooled for score in found["data"]]], expected, 1e-3)
    print(f"largest differences from transformers, over {len(flat)} sequences: {worst}")
