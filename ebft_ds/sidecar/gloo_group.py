"""A gloo group of its own beside whatever torch.distributed is set up for: store, group and broadcast, bound to one address."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from torch.distributed import DistNetworkError, DistStoreError

from ebft_ds.errors import WeightSyncError

StoreErrors = (DistNetworkError, DistStoreError)
LEAST_SECONDS = 0.1
"""gloo takes 0 as "for ever"."""


def serve_store(host: str, timeout: float) -> TCPStore:
    """A store on a free port of this address alone; `.port` says which."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((host, 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_delta(timeout), master_listen_fd=listener.detach())
    except (OSError, RuntimeError) as error:  # torch's own store errors are RuntimeErrors
        listener.close()
        raise WeightSyncError(f"no port can be opened on {host}: {error}; set sync_host to an address of this machine") from error


def connect_store(host: str, port: int, timeout: float) -> TCPStore:
    """A client of that store."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_delta(timeout))
    except StoreErrors as error:
        raise WeightSyncError(f"the trainer's store at {host}:{port} cannot be reached from here: {error}; is sync_host right?") from error


def join_group(store: Store, rank: int, world_size: int, *, towards: str, timeout: float) -> ProcessGroupGloo:
    """Connects to all others. `towards`: where they are; this side binds to its address on that route."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _delta(timeout)
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(towards), lazy_init=False)]
        return ProcessGroupGloo(PrefixStore("group", store), rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(
            f"the gloo group of {world_size} did not come together within {timeout:.0f} s: {_first_line(error)}"
        ) from error


def broadcast_bytes(group: ProcessGroupGloo, tensor: Tensor, timeout: float) -> None:
    """From rank 0 to all, any dtype; `tensor` must be contiguous. Errors: WeightSyncError after a lost peer or the timeout."""
    if not tensor.numel():
        return
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = _delta(timeout)
    try:
        group.broadcast(  # type: ignore[attr-defined]
            [tensor.detach().reshape(-1).view(torch.uint8)], options
        ).wait()
    except RuntimeError as error:
        raise WeightSyncError(f"the other side is gone or stands still: {_first_line(error)}") from error


def own_address(towards: str) -> str:
    """This machine's address on the route to a host; loopback for loopback."""
    if towards == "localhost":
        return "127.0.0.1"
    try:
        literal = ipaddress.ip_address(towards)
    except ValueError:
        literal = None
    if literal is not None and literal.is_loopback:
        return str(literal)
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # datagrams: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(f"no route to {towards}: {error}") from error


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, LEAST_SECONDS))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
