"""Real vLLM servers on the CPU for tests: one with the tiny model shared by a whole session, and a way to start further ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebft_ds.sidecar.command import ServerPlan
from ebft_ds.sidecar.server import ServerProcess
from tools.random_model import make_random_model

KEY = "key-of-the-tests"
START_SECONDS = 420.0
"""Half a minute on an idle machine, minutes on a crowded one: tests that use a server need `@pytest.mark.timeout(600)`."""


@pytest.fixture(scope="session")
def servable_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny_model` (random, four layers, tied embeddings), with heads of 32: vLLM's CPU attention knows no smaller ones."""
    return make_random_model(tmp_path_factory.mktemp("servable_model"), head_dim=32)


def tiny_plan(model: Path, **changes: Any) -> ServerPlan:
    """A small float32 server for `model` on a free loopback port; weights are received through `ebft_gloo`.

    `changes` are fields of ServerPlan: weight_transfer="ebft_disk", adapters=AdapterPlan(max_rank=8) with weight_transfer=None, ...
    """
    settings: dict[str, Any] = {
        "model": str(model),
        "max_model_len": 256,
        "api_key": KEY,
        "on_cpu": True,
        "kv_cache_memory_bytes": 64 * 2**20,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "weight_transfer": "ebft_gloo",
    }
    return ServerPlan(**(settings | changes))


@contextmanager
def started(plan: ServerPlan, log_path: Path, *, stop_grace: float = 5.0) -> Iterator[ServerProcess]:
    """A ready server, ended with everything it started when the block is left. `.address` is what clients need, `.pid()` its group."""
    server = ServerProcess(plan, log_path, stop_grace=stop_grace)
    try:
        server.start()
        server.wait_ready(START_SECONDS)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def vllm_server(servable_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The session's server (`servable_model`, `ebft_gloo`). A test leaves it running, resumed, and without requests in flight; its weights
    are whatever the last test pushed, so tests push their own first or compare with `weight_version`."""
    with started(tiny_plan(servable_model), tmp_path_factory.mktemp("vllm_server") / "server.log") as server:
        yield server


def group_members(pid: int) -> list[psutil.Process]:
    """The server's processes: all of its session."""
    return [process for process in psutil.process_iter() if _session_of(process) == pid]


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None
