"""Weights on their way in: checked against the manifest, held aside, and put into the model only when all are there.

They come under checkpoint names, and cut as the checkpoint is: experts one by one, say, where the model holds them in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.tensors import dtype_name
from ebft_ds.sync.names import CheckpointUnit, checkpoint_units
from ebft_ds.sync.slots import model_slots


def weight_specs(model: PreTrainedModel) -> list[TensorSpec]:
    """The model's parameters and saved buffers as a push must bring them; tied ones once, under the name that the checkpoint has."""
    return list(_Places(model).specs.values())


class _Places:
    """Where in a model each tensor of its checkpoint belongs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors: dict[str, Tensor] = {slot.name: slot.tensor for slot in model_slots(model)}
        """Parameters and saved buffers by name in memory."""
        units = checkpoint_units(model, {name: tensor.shape for name, tensor in self.tensors.items()})
        self.unit_of: dict[str, CheckpointUnit] = {name: unit for unit in units for name in unit.shapes}
        self.specs: dict[str, TensorSpec] = {
            name: TensorSpec(name, dtype_name(self.tensors[unit.members[0]].dtype), shape)
            for unit in units
            for name, shape in unit.shapes.items()
        }
        """By checkpoint name."""
        self.checkpoint_name: dict[str, str] = {name: name for name in self.specs}
        """A tied parameter may come under any of its names."""
        saved_as = {id(self.tensors[unit.members[0]]): next(iter(unit.shapes)) for unit in units if unit.step is None}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name not in self.tensors and id(parameter) in saved_as:
                self.checkpoint_name[name] = saved_as[id(parameter)]


class WeightStage:
    """One update in progress. Nothing here writes to the model before `swap`."""

    def __init__(self, model: PreTrainedModel, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._places = _Places(model)
        self._announced: dict[str, TensorSpec] = {}
        """By checkpoint name, as are the staged tensors."""
        self._staged: dict[str, Tensor] = {}
        for spec in manifest.tensors:
            self._announce(spec)
        self._check_whole()

    def _announce(self, spec: TensorSpec) -> None:
        where = f"weight push {self.manifest.version}"
        name = self._places.checkpoint_name.get(spec.name)
        if name is None:
            raise WeightSyncError(f"{where}: the engine's model has no parameter {spec.name!r}")
        wanted = self._places.specs[name]
        if wanted.shape != spec.shape:
            raise WeightSyncError(f"{where}: {spec.name} has shape {spec.shape}, not {wanted.shape}")
        if wanted.dtype != spec.dtype:
            raise WeightSyncError(f"{where}: {spec.name} is {spec.dtype}, the engine holds {wanted.dtype}")
        if name in self._announced:
            other = self._announced[name].name
            twice = "is announced twice" if other == spec.name else f"is tied to {other}; send it once"
            raise WeightSyncError(f"{where}: {spec.name} {twice}")
        self._announced[name] = spec

    def _check_whole(self) -> None:
        """A complete push needs every tensor; any push needs all that one parameter is made of."""
        wanted = self._places.specs if self.manifest.complete else [name for unit in self._units() for name in unit.shapes]
        missing = [name for name in wanted if name not in self._announced]
        if missing:
            raise WeightSyncError(f"weight push {self.manifest.version} leaves out {_some(missing)}")

    def _units(self) -> list[CheckpointUnit]:
        return list({id(unit): unit for unit in map(self._places.unit_of.__getitem__, self._announced)}.values())

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Check a bucket and keep it. The tensors must stay as they are until the update ends."""
        for sent_as, tensor in tensors:
            name = self._places.checkpoint_name.get(sent_as, sent_as)
            spec = self._announced.get(name)
            if spec is None or spec.name != sent_as:
                raise WeightSyncError(f"weight push {self.manifest.version}: {sent_as!r} was not announced")
            if list(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
                raise WeightSyncError(
                    f"weight push {self.manifest.version}: {sent_as} arrived as {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                    f"announced was {spec.dtype} {spec.shape}"
                )
            if name in self._staged:
                raise WeightSyncError(f"weight push {self.manifest.version}: {sent_as} arrived twice")
            self._staged[name] = tensor

    def check_complete(self, version: int) -> None:
        """Raises WeightSyncError while a tensor is missing or if `version` is not the announced one."""
        if version != self.manifest.version:
            raise WeightSyncError(f"weight push {self.manifest.version} was finished as version {version}")
        missing = [name for name in self._announced if name not in self._staged]
        if missing:
            raise WeightSyncError(f"weight push {version}: {_some(missing)} never arrived")

    @torch.no_grad()
    def swap(self) -> None:
        """Copy everything staged into its place, in place: tied heads and the model's own references stay intact."""
        for unit in self._units():
            for name, tensor in unit.to_memory({name: self._staged[name] for name in unit.shapes}).items():
                self._places.tensors[name].copy_(tensor)
        self._staged.clear()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
