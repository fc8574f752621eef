"""The learning rate as a pure function of the step, so that a resume needs no scheduler state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import get_scheduler

from ebft_ds.config.sections import LossSection, OptimSection
from ebft_ds.errors import ConfigError


def learning_rate_factor(optim: OptimSection, loss: LossSection, total_steps: int) -> Callable[[int], float]:
    """Factor on every parameter group's own learning rate at a step (counted from 0).

    Warm-start steps run at `warm_start_learning_rate`, flat; the schedule proper covers the steps after them.
    Source of the shapes: transformers' schedulers, asked for their lambda.
    """
    scheduled_steps = max(total_steps - loss.warm_start_steps, 1)
    warmup = optim.warmup_steps or round(optim.warmup_ratio * scheduled_steps)
    kwargs = dict(optim.lr_scheduler_kwargs)
    name: str = optim.lr_scheduler_type
    if optim.cosine_min_lr_ratio is not None:
        name, kwargs = "cosine_with_min_lr", {"min_lr_rate": optim.cosine_min_lr_ratio} | kwargs
    probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        scheduler = get_scheduler(
            name, probe, num_warmup_steps=warmup, num_training_steps=scheduled_steps, scheduler_specific_kwargs=kwargs
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={kwargs}: {error}") from error
    shape: Callable[[int], float] = scheduler.lr_lambdas[0]
    warm_factor = (loss.warm_start_learning_rate or optim.learning_rate) / optim.learning_rate

    def factor(step: int) -> float:
        return warm_factor if step < loss.warm_start_steps else float(shape(step - loss.warm_start_steps))

    return factor
