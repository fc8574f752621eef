"""What rank 0 and the rollout process say to each other: msgspec structs, no pickle. `id` ties a Reply to its request."""

from __future__ import annotations

from typing import Any

import msgspec

from ebft_ds.rollout.engine import ServerCounts
from ebft_ds.rollout.loop import LoopHealth
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.types import RolloutGroup, RolloutRequest


class Start(msgspec.Struct, tag=True):
    spec: RolloutProcessSpec


class Submit(msgspec.Struct, tag=True):
    requests: list[RolloutRequest]


class Cancel(msgspec.Struct, tag=True):
    indices: list[int]


class BeginUpdate(msgspec.Struct, tag=True):
    id: int
    manifest: WeightManifest


class Bucket(msgspec.Struct, tag=True):
    """Followed by the tensors' bytes, one after another."""

    id: int
    tensors: list[TensorSpec]


class FinishUpdate(msgspec.Struct, tag=True):
    id: int
    version: int


class AbortUpdate(msgspec.Struct, tag=True):
    id: int


class Score(msgspec.Struct, tag=True):
    id: int
    token_ids: list[int]
    temperature: float


class ExpectVersion(msgspec.Struct, tag=True):
    id: int
    version: int


class ConfirmVersion(msgspec.Struct, tag=True):
    id: int
    version: int


class GetState(msgspec.Struct, tag=True):
    id: int


class LoadState(msgspec.Struct, tag=True):
    id: int
    state: dict[str, Any]


class Stop(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    version: int
    vocab_size: int
    expected_weights: list[TensorSpec]
    """Empty for an engine over servers."""


class Groups(msgspec.Struct, tag=True):
    groups: list[RolloutGroup]


class Heartbeat(msgspec.Struct, tag=True):
    version: int
    tokens_generated: int
    health: LoopHealth
    servers: ServerCounts | None = None
    """None: no servers behind this engine."""


class Reply(msgspec.Struct, tag=True):
    id: int
    value: Any = None


class Refused(msgspec.Struct, tag=True):
    """The request could not be served; the process goes on."""

    id: int
    error: str
    message: str


class Failed(msgspec.Struct, tag=True):
    """The process is about to end."""

    error: str
    message: str
    traceback: str


PartOfUpdate = BeginUpdate | Bucket | FinishUpdate | AbortUpdate
ToProcess = Start | Submit | Cancel | PartOfUpdate | ExpectVersion | ConfirmVersion | Score | GetState | LoadState | Stop
FromProcess = Ready | Groups | Heartbeat | Reply | Refused | Failed
