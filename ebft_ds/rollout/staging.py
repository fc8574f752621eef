"""Weights on their way in: checked against the manifest, held aside, and put into the model only when all are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.tensors import dtype_name


def weight_specs(model: nn.Module) -> list[TensorSpec]:
    """The model's parameters as a push must bring them; tied ones once, under the name that comes first."""
    return [TensorSpec(name, dtype_name(param.dtype), list(param.shape)) for name, param in model.named_parameters()]


class WeightStage:
    """One update in progress. Nothing here writes to the model before `swap`."""

    def __init__(self, model: nn.Module, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._params: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self._announced: dict[str, TensorSpec] = {}
        self._staged: dict[str, Tensor] = {}
        self._check_manifest(model)

    def _check_manifest(self, model: nn.Module) -> None:
        owner: dict[int, str] = {}
        for spec in self.manifest.tensors:
            param = self._params.get(spec.name)
            if param is None:
                raise WeightSyncError(f"weight push {self.manifest.version}: the engine's model has no parameter {spec.name!r}")
            if list(param.shape) != spec.shape:
                raise WeightSyncError(f"weight push {self.manifest.version}: {spec.name} has shape {spec.shape}, not {list(param.shape)}")
            if dtype_name(param.dtype) != spec.dtype:
                raise WeightSyncError(
                    f"weight push {self.manifest.version}: {spec.name} is {spec.dtype}, the engine holds {dtype_name(param.dtype)}"
                )
            if id(param) in owner:
                other = owner[id(param)]
                twice = "is announced twice" if other == spec.name else f"is tied to {other}; send it once"
                raise WeightSyncError(f"weight push {self.manifest.version}: {spec.name} {twice}")
            owner[id(param)] = spec.name
            self._announced[spec.name] = spec
        if self.manifest.complete:
            missing = [name for name, param in model.named_parameters() if id(param) not in owner]
            if missing:
                raise WeightSyncError(f"weight push {self.manifest.version} leaves out {_some(missing)}")

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Check a bucket and keep it. The tensors must stay as they are until the update ends."""
        for name, tensor in tensors:
            spec = self._announced.get(name)
            if spec is None:
                raise WeightSyncError(f"weight push {self.manifest.version}: {name!r} was not announced")
            if list(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
                raise WeightSyncError(
                    f"weight push {self.manifest.version}: {name} arrived as {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                    f"announced was {spec.dtype} {spec.shape}"
                )
            if name in self._staged:
                raise WeightSyncError(f"weight push {self.manifest.version}: {name} arrived twice")
        self._staged.update(tensors)

    def check_complete(self, version: int) -> None:
        """Raises WeightSyncError while a tensor is missing or if `version` is not the announced one."""
        if version != self.manifest.version:
            raise WeightSyncError(f"weight push {self.manifest.version} was finished as version {version}")
        missing = [name for name in self._announced if name not in self._staged]
        if missing:
            raise WeightSyncError(f"weight push {version}: {_some(missing)} never arrived")

    @torch.no_grad()
    def swap(self) -> None:
        """Copy every staged tensor into its parameter, in place: tied heads and the model's own references stay intact."""
        for name, tensor in self._staged.items():
            self._params[name].copy_(tensor)
        self._staged.clear()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
