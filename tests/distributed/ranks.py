"""Runs a function on several real ranks (spawned processes, gloo) and returns what each of them answered."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing

PRELOADED = ["deepspeed", "datasets", "peft", "transformers", "ebft_ds.trainers.assembly"]
"""Imported once, in the server that the ranks are forked from: each rank would take ten seconds over them."""


def run_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(collectives, *arguments)` on each rank, by rank. A rank that raises fails the call with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        started = (world_size, port, folder, work, arguments)
        multiprocessing.start_processes(_rank, started, nprocs=world_size, join=True, start_method="forkserver")
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


class RankAnswers(dict[Any, list[Any]]):
    """key -> what the ranks of its scenario answered; each scenario runs when a test first asks for it."""

    def __init__(self, run: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self._run = run

    def __missing__(self, key: Any) -> list[Any]:
        self[key] = self._run(key)
        return self[key]


def _rank(rank: int, world_size: int, port: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    torch.set_num_threads(1)
    from ebft_ds.engine.build import init_distributed

    try:
        answer = work(init_distributed(900.0), *arguments)  # one rank may compile while another waits
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        raise
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(answer))
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
