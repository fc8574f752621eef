"""The gloo group of one push, with both ends in this process."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.tensors import DTYPES
from ebft_ds.sidecar.gloo_group import broadcast_bytes, connect_store, join_group, own_address, serve_store
from ebft_ds.sync.transports.deadline import in_thread


def pair(timeout: float = 20.0) -> tuple[Any, Any, Any]:
    """(store, sender's group, receiver's group)"""
    store = serve_store("127.0.0.1", timeout)

    def join() -> Any:
        return join_group(connect_store("127.0.0.1", store.port, timeout), 1, 2, towards="127.0.0.1", timeout=timeout)

    other = in_thread(join, "receiver")
    return store, join_group(store, 0, 2, towards="127.0.0.1", timeout=timeout), other.result(timeout)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1 << 18,)])
def test_every_dtype_and_shape_arrives_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _, sender, receiver = pair()
    sent = torch.randn(shape).to(dtype)
    received = torch.empty_like(sent)
    receiving = in_thread(lambda: broadcast_bytes(receiver, received, 20.0), "receive")
    broadcast_bytes(sender, sent, 20.0)
    receiving.result(20.0)
    assert torch.equal(sent, received)


def test_the_store_listens_on_its_address_alone() -> None:
    store = serve_store("127.0.0.1", 5.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))  # loopback, and not the address that was asked for
        probe.settimeout(5.0)
        with pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.2", store.port))
    with socket.socket() as probe:
        probe.settimeout(5.0)
        probe.connect(("127.0.0.1", store.port))


def test_a_peer_that_leaves_is_noticed_at_once() -> None:
    _, sender, receiver = pair(30.0)
    begun = time.monotonic()
    waiting = in_thread(lambda: broadcast_bytes(receiver, torch.empty(1000), 30.0), "receive")
    del sender
    with pytest.raises(WeightSyncError, match="gone or stands still"):
        waiting.result(25.0)
    assert time.monotonic() - begun < 25.0


def test_a_peer_that_stands_still_is_given_up_at_the_timeout() -> None:
    _, _sender, receiver = pair()
    with pytest.raises(WeightSyncError, match=r"gone or stands still: .*[Tt]imed out"):
        broadcast_bytes(receiver, torch.empty(1000), 0.5)


def test_a_group_that_does_not_come_together_says_so() -> None:
    store = serve_store("127.0.0.1", 0.5)
    with pytest.raises(WeightSyncError, match="the gloo group of 2 did not come together"):
        join_group(store, 0, 2, towards="127.0.0.1", timeout=0.5)


def test_an_address_that_is_not_ours_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(WeightSyncError, match="sync_host"):
        serve_store("192.0.2.1", 1.0)


@pytest.mark.parametrize(("towards", "found"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.9", "127.0.0.9")])
def test_own_address_towards_this_machine(towards: str, found: str) -> None:
    assert own_address(towards) == found


def test_own_address_towards_an_unknown_name() -> None:
    with pytest.raises(WeightSyncError, match=r"no route to nowhere\.invalid"):
        own_address("nowhere.invalid")
