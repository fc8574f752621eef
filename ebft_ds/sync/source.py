"""The weights as a rollout engine or an export wants them: checkpoint names, merged, read from ZeRO-3 shards bucket by bucket.

Every rank walks the same buckets and gathers together; rank 0 copies what it will send. Copies leave the gather before anything
is sent, so a slow receiver never holds parameters gathered. A consumer that still holds one bucket while it asks for the next
keeps three of them alive (that one, the gathered parameters, their copies): a bucket is closed at two thirds of `bucket_bytes`, so
that all of it stays within two `bucket_bytes` plus the largest tensor.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.errors import WeightSyncError
from ebft_ds.sync.merge import MergeLoss, merge
from ebft_ds.sync.names import CheckpointUnit, checkpoint_units
from ebft_ds.sync.slots import ADAPTER, Slot, model_slots

FILL = 2 / 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Piece:
    """One tensor of a push, as it is called and shaped in the checkpoint."""

    name: str
    shape: list[int]


@dataclass(frozen=True)
class _Part:
    """What is gathered, converted and copied together."""

    unit: CheckpointUnit
    slots: list[Slot]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list({id(p): p for slot in self.slots for p in slot.parameters}.values())

    def bytes_needed(self, dtype: torch.dtype) -> int:
        """Gathered or copied, whichever is more. `numel()` of a partitioned parameter is 0: full sizes count."""
        gathered = sum(full_numel(p) * p.element_size() for p in self.parameters)
        return max(gathered, sum(full_numel(slot.tensor) for slot in self.slots) * dtype.itemsize)


def full_shape(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter, partitioned or not."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_numel(parameter: Tensor) -> int:
    numel: int = getattr(parameter, "ds_numel", parameter.numel())
    return numel


@dataclass
class MergedWeightSource:
    """Merged weights of a network in `dtype`.

    Args:
        bucket_bytes: size of a bucket; a tensor that is larger makes one by itself.
        only_trained: leave out what cannot have changed (frozen weights without an adapter on them).
        whole_modules: with a trained tensor, also bring the rest of its attention, MLP or expert block: engines that fuse such
            tensors cannot take a part of them.
        device: where rank 0's copies go.
    """

    network: LanguageNetwork
    dtype: torch.dtype
    bucket_bytes: int
    is_main: bool
    only_trained: bool = True
    whole_modules: bool = False
    device: torch.device = CPU
    loss: MergeLoss = field(default_factory=MergeLoss)
    """What rounding to `dtype` cost in the last walk."""
    peak_gathered_bytes: int = 0
    """Most bytes of parameters that one gather of the last walk held."""
    _all_parts: list[_Part] | None = None

    def pieces(self, *, complete: bool = False) -> list[Piece]:
        """Every tensor of a push, in the order in which the buckets bring them. Tied weights appear once.

        `complete`: all of the model, whatever is trained.

        Raises:
            WeightSyncError: nothing to push, or a parameter that has no place in the checkpoint's format (named).
        """
        return [Piece(name, shape) for part in self._parts(complete) for name, shape in part.unit.shapes.items()]

    def buckets(self, *, complete: bool = False) -> Generator[list[tuple[str, Tensor]], None, None]:
        """Collective. Named contiguous tensors on rank 0; empty lists elsewhere, as many as rank 0 has buckets.

        Nothing is gathered while the caller has a bucket: it may be abandoned (closed) at any one of them.
        """
        self.loss, self.peak_gathered_bytes = MergeLoss(), 0
        for bucket in self._packed(complete):
            yield self._read(bucket)  # no name for it here: it must be gone when its receiver drops it

    def _parts(self, complete: bool) -> list[_Part]:
        if self._all_parts is None:
            slots = {slot.name: slot for slot in model_slots(self.network.base_model)}
            units = checkpoint_units(self.network.base_model, {name: full_shape(slot.tensor) for name, slot in slots.items()})
            self._all_parts = [_Part(unit, [slots[name] for name in unit.members]) for unit in units]
        if complete or not self.only_trained:
            return self._all_parts
        slots_of = [slot for part in self._all_parts for slot in part.slots if slot.trained]
        if not slots_of:
            raise WeightSyncError("there is no weight to push: the model has neither an adapter nor a trainable parameter")
        if not self.whole_modules:
            return [part for part in self._all_parts if any(slot.trained for slot in part.slots)]
        touched = {slot.group for slot in slots_of}
        return [part for part in self._all_parts if any(slot.group in touched for slot in part.slots)]

    def _packed(self, complete: bool) -> Iterator[list[_Part]]:
        bucket: list[_Part] = []
        size = 0
        for part in self._parts(complete):
            needed = part.bytes_needed(self.dtype)
            if bucket and size + needed > FILL * self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(part)
            size += needed
        if bucket:
            yield bucket

    def _read(self, bucket: list[_Part]) -> list[tuple[str, Tensor]]:
        parameters = list({id(p): p for part in bucket for p in part.parameters}.values())
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, sum(full_numel(p) * p.element_size() for p in parameters))
        with _gathered(parameters):
            return [pair for part in bucket for pair in self._copies(part)] if self.is_main else []

    @torch.no_grad()
    def _copies(self, part: _Part) -> list[tuple[str, Tensor]]:
        tensors = {slot.name: self._value(slot) for slot in part.slots}
        live = {slot.tensor.untyped_storage().data_ptr() for slot in part.slots}
        found = []
        for name, tensor in part.unit.to_checkpoint(tensors).items():
            copy = tensor.untyped_storage().data_ptr() in live
            found.append((name, tensor.to(self.device, self.dtype, copy=copy).contiguous()))
        return found

    def _value(self, slot: Slot) -> Tensor:
        tensor, shape = slot.tensor.detach(), full_shape(slot.tensor)
        if tensor.shape != shape:
            raise WeightSyncError(f"{slot.name} was not gathered: shape {list(tensor.shape)}, expected {list(shape)}")
        if not tensor.is_floating_point():
            raise WeightSyncError(f"{slot.name} holds {tensor.dtype}: only floating point weights can be pushed or exported")
        if slot.layer is None:
            return tensor
        return merge(slot.layer, ADAPTER, tensor, self.dtype, self.loss)


def _gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    if not parameters:
        return nullcontext()
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)
    return context
