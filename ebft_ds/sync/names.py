"""How a model's parameters are called and cut in its checkpoint.

transformers holds some of them otherwise in memory than on disk (experts fused into one tensor, renamed modules). It knows the way
back, for `save_pretrained`; that very knowledge is used here, but unit by unit, so that never more than a part of the model is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ebft_ds.errors import WeightSyncError


@dataclass(frozen=True)
class _Step:
    """One conversion: which tensors go in, under which pattern it knows each of them, and what the first result is called."""

    transform: Any
    target: str
    patterns: dict[str, str]
    """Tensor name -> pattern, in the order in which transformers would hand them over."""

    def run(self, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        transform = deepcopy(self.transform)
        for name, pattern in self.patterns.items():
            transform.add_tensor(self.target, name, pattern, tensors[name])
        made = transform.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@dataclass(frozen=True)
class CheckpointUnit:
    """Parameters that can only be converted together; nearly always one parameter and one tensor of the same name."""

    members: tuple[str, ...]
    """Parameter names in memory."""
    shapes: dict[str, list[int]]
    """Checkpoint name -> shape."""
    model: PreTrainedModel
    step: _Step | None
    """None: the checkpoint holds the parameter as it is, under the name in `shapes`."""
    conversions: list[Any]

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters by name in memory -> tensors by checkpoint name; may be views of what went in."""
        if self.step is None:
            return {next(iter(self.shapes)): tensors[self.members[0]]}
        return self.step.run(tensors, self.model)

    def to_memory(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The way back: all checkpoint tensors of the unit -> parameters by name in memory."""
        if self.step is None:
            return {self.members[0]: tensors[next(iter(self.shapes))]}
        found: dict[str, Tensor] = {}
        for step in _steps(list(self.shapes), self.conversions, reverse=False):
            found |= step.run(tensors, self.model)
        if set(found) != set(self.members):
            raise WeightSyncError(
                f"{type(self.model).__name__}: the tensors {_some(self.shapes)} make {_some(found)}, not {_some(self.members)}; "
                "this architecture's checkpoint format is not supported"
            )
        return found


def checkpoint_units(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> list[CheckpointUnit]:
    """What `save_pretrained` makes of the parameters `shapes` (name in memory -> full shape), unit by unit, in the order given.

    Raises:
        WeightSyncError: a conversion cannot be reversed; the message names the parameter.
    """
    conversions = _conversions(model)
    steps = _steps(list(shapes), [_reversed(c, model) for c in reversed(conversions)], reverse=True)
    units = [_unit(step, model, shapes, conversions) for step in steps]
    position = {name: i for i, name in enumerate(shapes)}
    units.sort(key=lambda unit: min(position[name] for name in unit.members))
    owners: dict[str, CheckpointUnit] = {}
    for unit in units:
        for name in unit.shapes:
            if name in owners:
                raise WeightSyncError(f"{_some(owners[name].members)} and {_some(unit.members)} would both be saved as {name}")
            owners[name] = unit
    return units


def _conversions(model: PreTrainedModel) -> list[Any]:
    """The conversions that loading the checkpoint used; for a model made from its configuration the architecture's own.

    After a ZeRO-3 load transformers remembers the unused ones as well, and saving would then invent names.
    """
    loaded = getattr(model, "_weight_conversions", None)  # set by from_pretrained alone
    if loaded is not None:
        return [conversion for conversion in loaded if conversion.was_used()]
    # Without a load nothing says whether a prefix was there: transformers leaves it as it is, too.
    return [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]


def _reversed(conversion: Any, model: PreTrainedModel) -> Any:
    try:
        return conversion.reverse_transform()
    except (ValueError, NotImplementedError) as error:
        raise WeightSyncError(f"{type(model).__name__}: {conversion} of its checkpoint cannot be reversed: {error}") from error


def _steps(names: Sequence[str], conversions: Sequence[Any], *, reverse: bool) -> list[_Step]:
    """Which names are converted together. In checkpoint order: some renamings depend on what came before."""
    conversions = deepcopy(conversions)  # they count what they match
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    steps: dict[str, _Step] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, reverse=reverse)
        if pattern is None:
            steps.setdefault(target, _Step(WeightRenaming(name, target), target, {})).patterns[name] = name
        else:
            steps.setdefault(target, _Step(by_pattern[pattern], target, {})).patterns[name] = pattern
    return list(steps.values())


def _unit(step: _Step, model: PreTrainedModel, shapes: Mapping[str, Sequence[int]], conversions: list[Any]) -> CheckpointUnit:
    members = tuple(step.patterns)
    if isinstance(step.transform, WeightRenaming):
        if len(members) > 1:
            raise WeightSyncError(f"{_some(members)} would both be saved as {step.target}")
        return CheckpointUnit(members, {step.target: list(shapes[members[0]])}, model, None, conversions)
    try:  # without data: only names and shapes are wanted
        made = step.run({name: torch.empty(list(shapes[name]), device="meta") for name in members}, model)
    except (ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise WeightSyncError(f"{_some(members)} cannot be brought into the checkpoint's format: {error}") from error
    return CheckpointUnit(members, {name: list(tensor.shape) for name, tensor in made.items()}, model, step, conversions)


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The module's own buffers that a checkpoint holds."""
    transient = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in transient}


def _some(names: Any) -> str:
    shown = ", ".join(list(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
