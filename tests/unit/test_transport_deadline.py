"""Threads that blocking steps are left to."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from ebft_ds.sync.transports.deadline import in_thread


def test_a_finished_step_has_let_go_of_what_it_sent() -> None:
    """Otherwise a third bucket is gathered while the first one still exists."""
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    start = threading.Event()

    def work(bucket: torch.Tensor = tensor) -> float:
        start.wait()
        return float(bucket.sum())

    future = in_thread(work, "step")
    found: list[torch.Tensor | None] = []
    future.add_done_callback(lambda _: found.append(gone()))  # called by the thread itself, at the moment that waiters wake
    del work, tensor
    start.set()
    assert future.result(10) == 3
    assert found == [None]


def test_a_failure_is_the_waiters() -> None:
    def fail() -> None:
        raise ValueError("sent nothing")

    with pytest.raises(ValueError, match="sent nothing"):
        in_thread(fail, "step").result(10)
