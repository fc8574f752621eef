"""Putting received tensors into the live model: by vLLM's layerwise reload, with a backup that any error brings back bit by bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from ebft_ds.errors import WeightSyncError
from ebft_ds.sidecar.receiver_layers import put_back


class Backup:
    """What the touched layers hold now, in host memory. Taken while the model serves: nothing writes to it meanwhile."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        self._model = model
        touched = {path: model.get_submodule(path) for path in layers}
        weights = {id(t) for layer in touched.values() for t in layer.parameters(recurse=False)}
        for path, module in model.named_modules():
            if isinstance(module, ParallelLMHead) and id(module.weight) in weights:
                touched[path] = module  # tied: it holds a packed copy of the embedding
        self.layers = touched
        self._kept = [_Kept(layer) for layer in touched.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """The model as it was, whatever a reload has done to it so far."""
        put_back(self._model)
        for kept in self._kept:
            kept.restore()


class _Kept:
    """One layer: its attributes (packed weights of the CPU build hide in closures), its quantisation method's, and its tensors' content."""

    def __init__(self, layer: nn.Module) -> None:
        self._objects: list[tuple[Any, dict[str, Any]]] = [(layer, dict(vars(layer)))]
        method = getattr(layer, "quant_method", None)
        if method is not None and hasattr(method, "__dict__"):
            self._objects.append((method, dict(vars(method))))
        self._registered = (dict(layer._parameters), dict(layer._buffers))
        tensors = [t for group in self._registered for t in group.values() if t is not None]
        self._tensors: list[tuple[Tensor, Tensor, Tensor]] = [(t, t.data, t.detach().to("cpu", copy=True)) for t in tensors]
        self._layer = layer

    def restore(self) -> None:
        for target, attributes in self._objects:
            vars(target).clear()
            vars(target).update(attributes)
        groups: list[Any] = [self._layer._parameters, self._layer._buffers]
        for live, saved in zip(groups, self._registered, strict=True):
            live.clear()
            live.update(saved)
        for tensor, data, content in self._tensors:
            tensor.data = data
            data.copy_(content)


@torch.no_grad()
def apply_tensors(
    model: nn.Module, model_config: ModelConfig, tensors: list[tuple[str, Tensor]], backup: Backup, elements: Mapping[str, int]
) -> None:
    """Load the tensors; on any error the model is what it was, and the error goes on.

    `backup` must cover every layer that the tensors go into; `elements`: how many each of them gets. Generation must stand still.
    A backup that cannot be restored ends the process: a server must not answer from a model in pieces.
    """
    try:
        with _quiet_reload():
            _forget_cpu_expert_kernels(backup.layers.values())
            initialize_layerwise_reload(model)
            with disable_mtp_completeness_check():
                model.load_weights(iter(tensors))  # type: ignore[operator]
            _check_loaded(backup.layers, elements)
            finalize_layerwise_reload(model, model_config)  # type: ignore[no-untyped-call]
        _repack_heads(model, backup.layers.values())
    except BaseException:
        try:
            backup.restore()
        except BaseException:
            logging.getLogger("vllm.ebft_ds").critical(
                "the weights could not be restored after a failed push; the server ends", exc_info=True
            )
            os._exit(70)
        raise


def _check_loaded(layers: Mapping[str, nn.Module], elements: Mapping[str, int]) -> None:
    """Every touched layer got all that a checkpoint has for it: vLLM has processed it by now, or waits for padding and buffers alone."""
    for path, layer in layers.items():
        info = get_layerwise_info(layer)
        if info.can_load() and info.load_numel != elements.get(path, 0):
            raise WeightSyncError(f"layer {path}: {info.load_numel} elements were loaded, {elements.get(path, 0)} expected")


def _forget_cpu_expert_kernels(layers: Iterable[nn.Module]) -> None:
    """On the CPU experts are packed only when their kernel is made: a second load would leave them unpacked under it."""
    if not current_platform.is_cpu():
        return
    for layer in layers:
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _repack_heads(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """On the CPU a tied head keeps a packed copy of the embedding, which a reload of the embedding leaves as it was."""
    if not current_platform.is_cpu():
        return
    weights = {id(t) for layer in layers for t in layer.parameters(recurse=False)}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod) and id(module.weight) in weights:
            method.process_weights_after_loading(module)


@contextmanager
def _quiet_reload() -> Iterator[None]:
    """Without vLLM's warning about every layer that a partial push leaves alone."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def wanted(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
