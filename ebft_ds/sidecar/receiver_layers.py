"""Which checkpoint tensors go into which layers of a loaded vLLM model, found by letting the model's own loader run over empty layers.

vLLM fuses projections and experts, and every architecture has its own rules for it. Instead of a table of rules, every parameter is
replaced by an empty one on the meta device (most of this is vLLM's own reload), `load_weights` gets every checkpoint name with a tensor
that has a shape and no content, and each loader call is noted. The live tensors are set aside meanwhile and put back: nothing is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec
from ebft_ds.rollout.tensors import DTYPES
from ebft_ds.sidecar.manifest_check import LayerMap

Fills = dict[str, dict[str, int]]
"""Checkpoint name -> layer -> elements that its loader copied there."""


def layer_map(model: nn.Module, specs: Iterable[TensorSpec]) -> LayerMap:
    """The map of this worker's part of the model.

    Raises:
        WeightSyncError: the model's loader does not take its own checkpoint's names and shapes.
    """
    known = [spec for spec in specs if spec.dtype in DTYPES]
    fills = _trace(model, known)
    alone = [spec for spec in known if spec.name not in fills]
    if any(_trace(model, [spec]) for spec in alone):
        # This loader collects tensors before it places them: what it placed cannot be told by order, so every name goes by itself.
        fills = {}
        for spec in known:
            fills.update(_trace(model, [spec]))
    layers: dict[str, set[str]] = {}
    elements: dict[str, int] = {}
    for name, found in fills.items():
        for layer, count in found.items():
            layers.setdefault(layer, set()).add(name)
            elements[layer] = elements.get(layer, 0) + count
    homeless = frozenset(spec.name for spec in known if spec.name not in fills)
    return LayerMap({layer: frozenset(names) for layer, names in layers.items()}, homeless, elements)


@torch.no_grad()
def _trace(model: nn.Module, specs: list[TensorSpec]) -> Fills:
    fills: Fills = {}
    current = [""]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for spec in specs:
            current[0] = spec.name
            yield spec.name, torch.zeros((), dtype=DTYPES[spec.dtype]).expand(spec.shape)  # no memory behind it
        current[0] = ""

    def note(layer: str, count: int) -> None:
        if current[0]:
            layers = fills.setdefault(current[0], {})
            layers[layer] = layers.get(layer, 0) + count

    with _emptied(model), _noting_loaders(model, note), disable_mtp_completeness_check():
        try:
            model.load_weights(tensors())  # type: ignore[operator]
        except (ValueError, RuntimeError, AssertionError, KeyError, TypeError, IndexError) as error:
            raise WeightSyncError(f"the server's model does not load its own checkpoint's {current[0]!r}: {error!r}") from error
    return fills


@contextmanager
def _emptied(model: nn.Module) -> Iterator[None]:
    """The model with all tensors on the meta device, and afterwards with its own tensors again."""
    initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            for group in (layer._parameters, layer._buffers):
                for name, tensor in group.items():
                    if tensor is not None and not tensor.is_meta:  # vLLM's reload leaves biases in place and writes to them at once
                        group[name] = to_meta_tensor(tensor)  # type: ignore[assignment]
        yield
    finally:
        put_back(model)


def put_back(model: nn.Module) -> None:
    """End a reload that was begun and not finished: every layer gets the tensors that it had."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()  # type: ignore[no-untyped-call]
    model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)  # type: ignore[assignment]


@contextmanager
def _noting_loaders(model: nn.Module, note: Callable[[str, int], None]) -> Iterator[None]:
    """Every parameter's loader tells `note` its layer's path and how many elements it copied; afterwards the loaders are as they were."""
    replaced: list[tuple[Any, Any]] = []
    try:
        for path, layer in model.named_modules():
            for tensor in get_layer_tensors(layer).values():
                loader = _get_original_loader(tensor)
                replaced.append((tensor, loader))
                tensor.weight_loader = _noting(loader, path, note)  # type: ignore[attr-defined]
        yield
    finally:
        for tensor, loader in replaced:
            tensor.weight_loader = loader


def _noting(loader: Callable[..., Any], path: str, note: Callable[[str, int], None]) -> Callable[..., Any]:
    signature = inspect.signature(loader)

    @wraps(loader)
    def noted(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        count, result = get_numel_loaded(loader, bound)
        note(path, count)
        return result

    return noted
