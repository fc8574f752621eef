"""Turning a network into a ZeRO-3 engine, and the small surface of it that the rest of the package uses."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.engine.leaf_modules import mark_leaf_modules
from ebft_ds.engine.network import FeatureWork, LanguageNetwork, LogProbWork, ScoreWork
from ebft_ds.engine.rotary import restore_rotary_buffers
from ebft_ds.errors import NumericsError

logger = logging.getLogger(__name__)

# DeepSpeed 0.19.8 still calls the collectives' former names; torch 2.13 says so at every single call.
warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")


def init_distributed(timeout_seconds: float) -> Collectives:
    """Joins the job's process group (from the launcher's environment; a single process makes its own) and returns the CPU group."""
    if not dist.is_initialized():
        use_own_ninja()
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        backend = "nccl" if accelerator_count() else "gloo"
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_seconds))
    return Collectives.from_default_group(timeout_seconds)


def use_own_ninja() -> None:
    """Puts this environment's ninja first on PATH.

    DeepSpeed compiles its ops with whatever ninja it finds; its launcher finds the environment's, a plain start the system's, and each
    of them distrusts the other's build log and compiles everything anew (minutes).
    """
    folder = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", "").split(os.pathsep)
    if (Path(folder) / "ninja").exists() and paths[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *paths])


def accelerator_count() -> int:
    """GPUs that DeepSpeed will use; 0 under DS_ACCELERATOR=cpu, whatever the machine has."""
    accelerator = get_accelerator()
    return int(accelerator.device_count()) if accelerator.device_name() == "cuda" else 0


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class ZeroEngine:
    """A ZeRO-3 engine around a LanguageNetwork. All methods are collective."""

    def __init__(
        self,
        network: LanguageNetwork,
        deepspeed_config: dict[str, Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        learning_rate_factor: Callable[[int], float] | None = None,
    ) -> None:
        self.network = network
        mark_leaf_modules(network)
        self.deepspeed, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=deepspeed_config)
        self._factor = learning_rate_factor
        self._base_rates = [group["lr"] for group in self.deepspeed.optimizer.param_groups] if optimizer is not None else []
        restore_rotary_buffers(network)
        network.train(optimizer is not None)

    @property
    def device(self) -> torch.device:
        return torch.device(self.deepspeed.device)

    def features(self, work: FeatureWork) -> list[Tensor]:
        layers: list[Tensor] = self.deepspeed(work)
        self._end_prefetches()
        return layers

    def log_probs(self, work: LogProbWork) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy = self.deepspeed(work)
        return log_probs, entropy

    def frozen_log_probs(self, work: LogProbWork) -> tuple[Tensor, Tensor | None]:
        """Without gradient, in eval mode (the mode is restored)."""
        with self._frozen():
            return self.log_probs(work)

    def scores(self, work: ScoreWork) -> Tensor:
        """Rewards [N], float32, of a reward model."""
        rewards: Tensor = self.deepspeed(work)
        return rewards

    def frozen_scores(self, work: ScoreWork) -> Tensor:
        """Without gradient, in eval mode (the mode is restored)."""
        with self._frozen():
            return self.scores(work)

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        training = self.network.training
        self.network.eval()
        try:
            with torch.no_grad():
                yield
            self._end_prefetches()
        finally:
            self.network.train(training)

    def _end_prefetches(self) -> None:
        """Lets go of what ZeRO-3 has begun to gather for the backward that its recorded trace goes on with, and that does not come now.

        Otherwise a gather of single parameters right after it (an export, a weight push) would find some of them in flight.
        """
        optimizer = self.deepspeed.optimizer  # without a torch optimizer it is the offload itself
        offload = optimizer if isinstance(optimizer, DeepSpeedZeRoOffload) else optimizer.parameter_offload
        offload.get_param_coordinator()._clean_inflight_param_registry()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulates the gradient of `loss`, which carries global denominators: the sum over ranks and micro-batches is meant.

        DeepSpeed averages over ranks, hence the factor world_size; its own division by accumulation steps is switched off.
        """
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def step(self, step: int) -> tuple[float, float]:
        """Optimizer step number `step` (from 0). Returns (gradient norm before clipping, learning rate of the first group)."""
        assert self._factor is not None
        factor = self._factor(step)
        for group, rate in zip(self.deepspeed.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.deepspeed.step()
        if self.deepspeed.optimizer.overflow and not self.deepspeed.fp16_enabled():
            # DeepSpeed skips such a step without a word; in bf16 and float32 nothing but a broken gradient leads here.
            raise NumericsError(f"step {step}: the gradient is not finite on some rank; the optimizer step was not taken")
        norm = self.deepspeed.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan"), float(self._base_rates[0] * factor)
