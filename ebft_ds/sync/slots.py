"""The plain model inside a network: every parameter once, under the name it has without PEFT's wrappers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft_ds.errors import WeightSyncError
from ebft_ds.sync.merge import check_mergeable
from ebft_ds.sync.names import saved_buffers

ADAPTER = "default"


@dataclass(frozen=True)
class Slot:
    """One parameter or saved buffer of the plain model."""

    name: str
    """In memory, without PEFT's wrappers."""
    tensor: Tensor
    layer: LoraLayer | None
    """Set: the tensor is the base weight of this adapter layer, and is to be merged."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that must be gathered for it."""
        adapter = adapter_parameters(self.layer) if self.layer is not None else []
        return ([self.tensor] if isinstance(self.tensor, nn.Parameter) else []) + adapter

    @property
    def trained(self) -> bool:
        return self.layer is not None or self.tensor.requires_grad

    @property
    def group(self) -> str:
        """The block's part that it belongs to (a whole attention, MLP or expert block): engines fuse tensors within it.

        Outside of blocks, the module itself.
        """
        path = self.name.split(".")[:-1]
        number = next((i for i, part in enumerate(path) if part.isdigit()), len(path))
        return ".".join(path[: number + 2])


def adapter_parameters(layer: LoraLayer) -> list[nn.Parameter]:
    """The adapter's own parameters (nested wrappers of other parameters have theirs below `base_layer`)."""
    return [p for name, p in layer.named_parameters() if not name.startswith("base_layer.")]


def model_slots(model: PreTrainedModel) -> list[Slot]:
    """In model order. Tied weights once, under the name that the checkpoint keeps.

    Raises:
        WeightSyncError: an adapter cannot be merged, or training has untied what the checkpoint ties. The message names it.
    """
    adapters = _adapters(model)
    slots = [slot for path, module in _plain_modules(model) for slot in _slots_of(path, module, adapters)]
    ignored = set(model._keys_to_ignore_on_save or ())
    return _without_ties([slot for slot in slots if slot.name not in ignored], model)


def _adapters(model: nn.Module) -> dict[tuple[int, str], LoraLayer]:
    """(id of a module, name of its parameter) -> the adapter layer on it."""
    found: dict[tuple[int, str], LoraLayer] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            if ADAPTER not in module.scaling:
                continue
            check_mergeable(module, ADAPTER, path)
            name = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            found[id(module.get_base_layer()), name] = module
        elif isinstance(module, BaseTunerLayer):
            raise WeightSyncError(f"{path}: adapters of type {type(module).__name__} cannot be merged; use LoRA, rsLoRA or DoRA")
        elif isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise WeightSyncError(f"{path}: {type(module).__name__} cannot be merged; train the module whole (lora_modules_to_save)")
    return found


def _plain_modules(model: nn.Module) -> Iterator[tuple[list[str], nn.Module]]:
    """(path without PEFT's wrappers, module) of all modules that are not PEFT's own."""
    for dotted, module in model.named_modules():
        path = dotted.split(".") if dotted else []
        # The original module has been replaced by the trained copy in modules_to_save.
        if any(part.startswith("lora_") or part == "original_module" for part in path):
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            continue
        if any(path[i - 1] == "modules_to_save" and part != ADAPTER for i, part in enumerate(path) if i):
            continue
        yield _without_wrappers(path), module


def _without_wrappers(path: list[str]) -> list[str]:
    kept = []
    for i, part in enumerate(path):
        if part in ("base_layer", "modules_to_save") or (i and path[i - 1] == "modules_to_save"):
            continue
        kept.append(part)
    return kept


def _slots_of(path: list[str], module: nn.Module, adapters: dict[tuple[int, str], LoraLayer]) -> Iterator[Slot]:
    tensors: dict[str, Tensor] = dict(module.named_parameters(recurse=False)) | saved_buffers(module)
    for name, tensor in tensors.items():
        yield Slot(".".join([*path, name]), tensor, adapters.get((id(module), name)))


def _without_ties(slots: list[Slot], model: PreTrainedModel) -> list[Slot]:
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})  # older custom code does not set it
    by_name = {slot.name: slot for slot in slots}
    owners: dict[int, list[Slot]] = defaultdict(list)
    for slot in slots:
        owners[id(slot.tensor)].append(slot)
    for name, source in tied.items():
        if name not in by_name or source not in by_name:
            continue
        one, other = by_name[name], by_name[source]
        if one.tensor is not other.tensor or one.layer is not None or other.layer is not None:
            raise WeightSyncError(
                f"{name} is tied to {source} in the checkpoint, but one of them is trained by itself (adapter or lora_modules_to_save): "
                "the trained model does not fit its own format. Train neither, or untie them (tie_word_embeddings in config.json)"
            )
    kept = []
    for slot in slots:
        same = owners[id(slot.tensor)]
        if slot is next((s for s in same if s.name not in tied), same[0]):
            kept.append(slot)
    return kept
