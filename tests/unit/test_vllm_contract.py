"""The installed vLLM is the one that our classes, routes and calls were written for. Skipped where vLLM is not installed."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.plugin import BACKENDS, register
from ebft_ds.sidecar.push_ops import METHOD
from ebft_ds.sync.transports.deadline import Deadline, in_thread
from ebft_ds.sync.transports.hand_over import HandOver

pytest.importorskip("vllm")


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_plugin_registers_once_and_imports_nothing_heavy() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    register()
    register()
    assert set(BACKENDS) <= set(Factory._registry)
    entry = [e for e in __import__("importlib.metadata").metadata.entry_points(group="vllm.general_plugins") if e.name == "ebft_ds"]
    assert [e.value for e in entry] == ["ebft_ds.sidecar.plugin:register"]


def test_a_vllm_without_the_registry_still_starts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    monkeypatch.delattr(Factory, "_registry")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    assert "could not be registered" in caplog.text


def test_the_receiver_is_the_engine_that_vllm_makes() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.v1.worker.gpu_worker import Worker

    from ebft_ds.sidecar.receiver import WeightReceiver

    register()
    assert {Factory._registry[name]() for name in BACKENDS} == {WeightReceiver}
    assert not WeightReceiver.__abstractmethods__
    assert parameters(WeightReceiver.__init__) == parameters(WeightTransferEngine.__init__)
    assert callable(getattr(Worker, METHOD)), "reached by /collective_rpc"


def test_vllms_reload_is_the_one_that_the_receiver_drives() -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise, meta, types

    assert parameters(initialize_layerwise_reload) == ["model"]
    assert parameters(layerwise.finalize_layerwise_processing) == ["model", "model_config"]
    assert callable(finalize_layerwise_reload)
    assert parameters(layerwise._place_kernel_tensors) == ["layer", "info"]
    assert parameters(layerwise._get_original_loader) == ["tensor"]
    assert parameters(meta.get_numel_loaded) == ["weight_loader", "args"]
    assert parameters(meta.to_meta_tensor) == ["tensor"]
    fields = {field.name for field in dataclasses.fields(types.LayerReloadingInfo)}
    assert {"load_numel", "load_numel_total", "kernel_tensors", "loaded_weights"} <= fields


def test_vllms_trainer_side_is_the_one_that_we_drive() -> None:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, VLLMWeightSyncClient, WeightSource
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLWeightTransferUpdateInfo

    from ebft_ds.sync.transports.vllm_source import FanOutClient, ZeroWeightSource

    nccl = {f.name for f in dataclasses.fields(NCCLTrainerInitInfo)}
    assert nccl == {"rank", "master_address", "master_port", "world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}
    assert {f.name for f in dataclasses.fields(IPCTrainerInitInfo)} == {"rank", "packed", "packed_buffer_size_bytes"}
    assert "rank_offset" in {f.name for f in dataclasses.fields(NCCLWeightTransferInitInfo)}
    assert [f.name for f in dataclasses.fields(NCCLWeightTransferUpdateInfo)] == ["names", "dtype_names", "shapes"]
    assert issubclass(ZeroWeightSource, WeightSource)
    assert not ZeroWeightSource.__abstractmethods__
    control = ControlLoop()
    try:
        assert isinstance(FanOutClient(control, [], []), VLLMWeightSyncClient)
    finally:
        control.close()
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        assert parameters(getattr(FanOutClient, name)) == parameters(getattr(VLLMWeightSyncClient, name))
    assert parameters(TrainerWeightTransferEngine.send_weights) == ["self"]
    for name in ("_all_gather_and_merge_handles", "_post_send_sync"):  # overridden by RankZeroIpcEngine
        assert name in vars(IPCTrainerWeightTransferEngine)


class RecordingServers:
    """Stands for the HTTP routes of several servers, since no GPU server can run here: notes each call."""

    def __init__(self, control: ControlLoop, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.addresses = [ServerAddress(f"http://127.0.0.1:{i + 1}") for i in range(count)]
        self.calls: list[tuple[int, str, Any]] = []
        for i, address in enumerate(self.addresses):
            api = control.api(address)
            for name in ("init_transfer", "start_update", "update", "finish_update"):
                monkeypatch.setattr(api, name, self._noting(i, name))

    def _noting(self, server: int, name: str) -> Callable[..., Any]:
        async def note(*arguments: Any) -> None:
            self.calls.append((server, name, arguments[0] if len(arguments) > 1 else None))

        return note

    def of(self, name: str) -> list[Any]:
        return [argument for _, call, argument in sorted(self.calls, key=lambda c: c[0]) if call == name]


class RecordingGroup:
    """Stands for the NCCL communicator."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        assert src == 0
        assert tensor.is_contiguous()
        self.sent.append(tensor.clone())


class NoStream:
    def synchronize(self) -> None:
        pass


@pytest.fixture
def control() -> Iterator[ControlLoop]:
    loop = ControlLoop()
    yield loop
    loop.close()


TENSORS = [(f"layer.{i}.weight", torch.randn(3, i + 1)) for i in range(5)]
MANIFEST = WeightManifest(7, [TensorSpec(name, "float32", list(t.shape)) for name, t in TENSORS])


def sent_by_vllms_nccl_engine(
    control: ControlLoop, monkeypatch: pytest.MonkeyPatch, buckets: list[list[tuple[str, Tensor]]]
) -> tuple[RecordingServers, RecordingGroup]:
    from vllm.distributed.weight_transfer import nccl_engine

    from ebft_ds.sync.transports.vllm_source import FanOutClient, ZeroWeightSource

    servers, group = RecordingServers(control, monkeypatch, 2), RecordingGroup()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: NoStream())
    client, source = FanOutClient(control, servers.addresses, [2, 1]), ZeroWeightSource(torch.device("cpu"))
    deadline = Deadline(20.0)
    client.begin(deadline, "run:7")
    info = nccl_engine.NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=1, world_size=4, packed=False)
    engine = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    hand_over = HandOver(deadline)
    source.begin(MANIFEST, hand_over)

    def send() -> None:
        try:
            engine.send_weights()
        except BaseException as error:
            hand_over.fail(str(error))
            raise

    sending = in_thread(send, "send")
    try:
        for bucket in buckets:
            hand_over.put(bucket)
        hand_over.end()
    finally:
        error = sending.exception(20.0)
    if error is not None:
        raise error
    return servers, group


def test_vllms_nccl_engine_sends_our_buckets_to_every_server(control: ControlLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, group = sent_by_vllms_nccl_engine(control, monkeypatch, [TENSORS[:2], TENSORS[2:4], TENSORS[4:]])
    assert all(torch.equal(a, b) for a, (_, b) in zip(group.sent, TENSORS, strict=True))
    assert [info["rank_offset"] for info in servers.of("init_transfer")] == [1, 3], "the second server's ranks follow the first one's two"
    assert {info["world_size"] for info in servers.of("init_transfer")} == {4}
    update = {"names": [n for n, _ in TENSORS], "dtype_names": ["float32"] * 5, "shapes": [list(t.shape) for _, t in TENSORS]}
    assert servers.of("update") == [update, update]
    assert servers.of("finish_update") == ["run:7", "run:7"]
    assert [name for server, name, _ in servers.calls if server == 0] == ["init_transfer", "start_update", "update", "finish_update"]


def test_what_the_source_lacks_ends_in_an_error_and_not_in_a_hang(control: ControlLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((ValueError, WeightSyncError), match=r"yielded 4 parameters|declared 'layer.0"):
        sent_by_vllms_nccl_engine(control, monkeypatch, [TENSORS[:4]])
    with pytest.raises((ValueError, WeightSyncError), match=r"declared 'layer.0.weight'"):
        sent_by_vllms_nccl_engine(control, monkeypatch, [TENSORS[1:], TENSORS[:1]])


def test_cuda_handles_are_pickled_as_vllms_server_reads_them(control: ControlLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    from ebft_ds.sync.transports.vllm_source import FanOutClient

    servers = RecordingServers(control, monkeypatch, 1)
    client = FanOutClient(control, servers.addresses, [1])
    client.begin(Deadline(5.0), "run:1")
    handles = {"GPU-1": (1, (2, 3), "x")}
    info = {
        "names": ["a"],
        "dtype_names": ["float32"],
        "shapes": [[2]],
        "ipc_handles": handles,
        "ipc_handles_pickled": None,
        "tensor_sizes": [8],
    }
    client.update_weights(info)
    [sent] = servers.of("update")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    read = IPCWeightTransferUpdateInfo(**sent)
    assert (read.ipc_handles, read.tensor_sizes, read.names) == (handles, [8], ["a"])


def test_hand_over_keeps_one_bucket_between_the_threads() -> None:
    hand_over = HandOver(Deadline(10.0))
    taken: list[int] = []

    def take() -> None:
        for bucket in hand_over:
            taken.append(len(bucket))

    taking = in_thread(take, "take")
    for size in (1, 2, 3):
        hand_over.put(TENSORS[:size])
        assert taken[: size - 1] == list(range(1, size)), "put returns when the bucket was taken"
    hand_over.end()
    taking.result(10.0)
    assert taken == [1, 2, 3]
    late = HandOver(Deadline(0.1))
    with pytest.raises(WeightSyncError, match=r"0.1 s are over"):
        late.put(TENSORS[:1])
    broken = HandOver(Deadline(10.0))
    broken.fail("the other side broke")
    with pytest.raises(WeightSyncError, match="the other side broke"):
        broken.put(TENSORS[:1])
