"""The life of a push by vLLM's own engines: no GPU here, so routes and engine are played; the order of calls and the failures are ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import ServerUnreachable
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.versions import VersionNames

pytest.importorskip("vllm")

from ebft_ds.sync.transports.vllm_native import Engine, NativeTransport
from ebft_ds.sync.transports.vllm_nccl import rendezvous_host
from ebft_ds.sync.transports.vllm_source import FanOutClient, ZeroWeightSource

TENSORS = [(f"layer.{i}.weight", torch.randn(4)) for i in range(6)]
NAMES = VersionNames("ebft-here")


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, [TensorSpec(name, "float32", [4]) for name, _ in TENSORS])


def buckets() -> Iterator[list[tuple[str, Tensor]]]:
    yield TENSORS[:2]
    yield TENSORS[2:]


class Servers:
    """What two servers were asked, and the labels of their weights."""

    def __init__(self, control: ControlLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses = [ServerAddress("http://127.0.0.1:1"), ServerAddress("http://127.0.0.1:2")]
        self.calls: list[tuple[str, str]] = []
        self.labels = {address.url: "default" for address in self.addresses}
        self.refuse: str | None = None
        for address in self.addresses:
            api = control.api(address)
            for name in ("pause", "resume", "init_transfer", "start_update", "update", "finish_update", "shutdown_transfer"):
                monkeypatch.setattr(api, name, self._route(address.url, name))
            monkeypatch.setattr(api, "num_workers", self._value(lambda url: 1, address.url))
            monkeypatch.setattr(api, "weight_version", self._value(lambda url: self.labels[url], address.url))
            monkeypatch.setattr(api, "set_weight_version", self._labelling(address.url))

    def _route(self, url: str, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> None:
            self.calls.append((url, name))
            if self.refuse == name:
                raise ServerUnreachable(f"{url}/{name}: no answer")
            if name == "finish_update":
                self.labels[url] = arguments[0]

        return call

    def _value(self, value: Callable[[str], Any], url: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            return value(url)

        return call

    def _labelling(self, url: str) -> Callable[..., Any]:
        async def call(name: str, timeout: float) -> None:
            self.calls.append((url, f"label {name}"))
            self.labels[url] = name

        return call

    def of_first(self) -> list[str]:
        return [name for url, name in self.calls if url == self.addresses[0].url]


class PlayedEngine:
    """Sends into a list. `fault` is called before the last tensor."""

    def __init__(self, client: FanOutClient, source: ZeroWeightSource) -> None:
        self.client, self.source = client, source
        self.sent: list[str] = []
        self.fault: Callable[[], None] = lambda: None

    def send_weights(self) -> None:
        self.client.start_weight_update()
        names = [meta.name for meta in self.source.metadata()]
        self.client.update_weights({"names": names})
        for name, _ in self.source:
            if name == names[-1]:
                self.fault()
            self.sent.append(name)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.sent.append("shutdown")


class PlayedTransport(NativeTransport):
    engines: list[PlayedEngine]

    def make_engine(self, client: FanOutClient, source: ZeroWeightSource, servers: list[ServerAddress], workers: list[int]) -> Engine:
        client.init_weight_transfer_engine({"rank_offset": 1})
        self.engines.append(PlayedEngine(client, source))
        return self.engines[-1]  # type: ignore[return-value]


@pytest.fixture
def control() -> Iterator[ControlLoop]:
    loop = ControlLoop()
    yield loop
    loop.close()


@pytest.fixture
def servers(control: ControlLoop, monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(control, monkeypatch)


@pytest.fixture
def transport(control: ControlLoop, servers: Servers) -> PlayedTransport:
    made = PlayedTransport(servers.addresses, NAMES, control, device=torch.device("cpu"))
    made.engines = []
    return made


def test_generation_stands_still_from_before_the_start_to_after_the_finish(transport: PlayedTransport, servers: Servers) -> None:
    result = transport.push(manifest(4), buckets(), 20.0)
    assert (result.confirmed, result.lost) == (2, 0)
    assert servers.of_first() == ["init_transfer", "pause", "start_update", "update", "finish_update", "resume"]
    assert transport.engines[0].sent == [name for name, _ in TENSORS]
    assert not transport.stale(4)
    transport.push(manifest(5), buckets(), 20.0)
    assert len(transport.engines) == 1, "the group lives on"
    assert set(servers.labels.values()) == {NAMES.name(5)}


def test_a_push_that_breaks_leaves_servers_paused_labelled_and_out_of_use_until_they_are_started_again(
    transport: PlayedTransport, servers: Servers
) -> None:
    transport.push(manifest(1), buckets(), 20.0)
    servers.calls.clear()

    def fault() -> None:
        raise RuntimeError("the peer is gone")

    transport.engines[0].fault = fault
    with pytest.raises(WeightSyncError, match=r"push 2: .*the peer is gone"):
        transport.push(manifest(2), buckets(), 20.0)
    assert "resume" not in servers.of_first(), "its model is in pieces: a request would kill it"
    assert transport.stale(1)
    with pytest.raises(WeightSyncError, match="restart that server"):
        transport.push(manifest(2), buckets(), 20.0)
    servers.labels = dict.fromkeys(servers.labels, "default")
    result = transport.push(manifest(2), buckets(), 20.0)
    assert result.confirmed == 2
    assert len(transport.engines) == 2, "over a new group"
    assert servers.of_first()[-1] == "resume"
    assert not transport.stale(2)


def test_a_server_that_cannot_be_paused_fails_the_push_and_all_go_on(transport: PlayedTransport, servers: Servers) -> None:
    servers.refuse = "pause"
    with pytest.raises(WeightSyncError, match=r"pausing .*no answer"):
        transport.push(manifest(1), buckets(), 20.0)
    assert servers.of_first()[-1] == "resume"
    assert "start_update" not in servers.of_first()


def test_an_engine_that_stands_still_is_given_up_in_time(transport: PlayedTransport, servers: Servers) -> None:
    transport.push(manifest(1), buckets(), 20.0)
    stop = time.monotonic() + 30.0
    ended: list[bool] = []

    def hang() -> None:
        while time.monotonic() < stop and not ended:
            time.sleep(0.01)

    transport.engines[0].fault = hang
    begun = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"within 1.5 s"):
        transport.push(manifest(2), buckets(), 1.5)
    assert time.monotonic() - begun < 15
    ended.append(True)


def test_the_rendezvous_is_an_address_that_every_server_reaches() -> None:
    here, there = ServerAddress("http://127.0.0.1:1"), ServerAddress("http://192.0.2.7:1")
    assert rendezvous_host([here], "10.0.0.1") == "127.0.0.1"
    assert rendezvous_host([here, there], "10.0.0.1") == "10.0.0.1"
