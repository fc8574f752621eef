"""What vLLM's trainer-side engines are driven with: a weight source over the trainer's buckets, and a client for several servers."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.rollout.tensors import DTYPES
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sync.transports.deadline import Deadline
from ebft_ds.sync.transports.hand_over import HandOver


class ZeroWeightSource(WeightSource):
    """One push's buckets, on `device`. `begin` before each `send_weights`; the buckets are gathered by another thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._manifest: WeightManifest | None = None
        self._buckets: HandOver | None = None

    def begin(self, manifest: WeightManifest, buckets: HandOver) -> None:
        self._manifest = manifest
        self._buckets = buckets

    def metadata(self) -> list[ParamMeta]:
        if self._manifest is None:
            raise WeightSyncError("the source has no push yet")
        return [ParamMeta(spec.name, DTYPES[spec.dtype], tuple(spec.shape)) for spec in self._manifest.tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._buckets is None:
            raise WeightSyncError("the source has no push yet")
        for bucket in self._buckets:
            for name, tensor in bucket:
                yield name, tensor.to(self._device)
            del bucket


class FanOutClient:
    """vLLM's VLLMWeightSyncClient over several servers: each call goes to all at once and returns when all have answered."""

    def __init__(self, control: ControlLoop, servers: Sequence[ServerAddress], workers: Sequence[int]) -> None:
        """`workers`: how many each server has; their ranks follow each other in this order."""
        self._control = control
        self._servers = list(servers)
        self._offsets = [sum(workers[:i]) for i in range(len(workers))]
        self.deadline = Deadline(0.0)
        self.version_name = ""
        self.started = False
        """Servers may have torn their models apart."""

    def begin(self, deadline: Deadline, version_name: str) -> None:
        self.deadline = deadline
        self.version_name = version_name
        self.started = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = {
            server.url: init_info | ({"rank_offset": init_info["rank_offset"] + offset} if "rank_offset" in init_info else {})
            for server, offset in zip(self._servers, self._offsets, strict=True)
        }
        self._all(lambda api: api.init_transfer(infos[api.address.url], self.deadline.left))

    def start_weight_update(self) -> None:
        self.started = True
        self._all(lambda api: api.start_update(self.deadline.left))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        info = [_json_ready(part) for part in update_info] if isinstance(update_info, list) else _json_ready(update_info)
        self._all(lambda api: api.update(info, self.deadline.left))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda api: api.finish_update(weight_version or self.version_name, self.deadline.left))
        self.started = False

    def _all(self, call: Callable[[VllmApi], Awaitable[None]]) -> None:
        for outcome in self._control.each(self._servers, call):
            if isinstance(outcome, BaseException):
                raise outcome


def _json_ready(info: dict[str, Any]) -> dict[str, Any]:
    """CUDA handles travel pickled, as vLLM's own HTTP client sends them; the server must allow it (VLLM_ALLOW_INSECURE_SERIALIZATION)."""
    if info.get("ipc_handles") is None:
        return {name: value for name, value in info.items() if value is not None}
    pickled = base64.b64encode(pickle.dumps(info["ipc_handles"])).decode()
    return {n: v for n, v in info.items() if n != "ipc_handles" and v is not None} | {"ipc_handles_pickled": pickled}
