"""How the loss coefficients change over a run (METHOD section 4). Steps are optimizer steps from 0, warm start included."""

from __future__ import annotations


def in_warm_start(step: int, *, warm_start_steps: int) -> bool:
    """Whether this step trains on the references only, without rollouts."""
    return step < warm_start_steps


def rl_coefficient(step: int, *, warm_start_steps: int, ebft_rl_coef: float, rl_warmup_start: float, rl_warmup_steps: int) -> float:
    """Weight of the EBFT policy loss at a step.

    0 during the warm start; then ebft_rl_coef times a factor that starts at `rl_warmup_start` and reaches 1 after `rl_warmup_steps` steps.
    """
    if in_warm_start(step, warm_start_steps=warm_start_steps):
        return 0.0
    if rl_warmup_steps == 0:
        return ebft_rl_coef
    progress = min(1.0, (step - warm_start_steps) / rl_warmup_steps)
    return ebft_rl_coef * (rl_warmup_start + (1.0 - rl_warmup_start) * progress)


def ce_coefficient(step: int, *, warm_start_steps: int, ebft_ce_coef: float, ce_decay_steps: int) -> float:
    """Weight of the cross-entropy on references at a step.

    1 during the warm start, whatever ebft_ce_coef is; then ebft_ce_coef, falling linearly to 0 over `ce_decay_steps` steps (0: constant).
    """
    if in_warm_start(step, warm_start_steps=warm_start_steps):
        return 1.0
    if ce_decay_steps == 0:
        return ebft_ce_coef
    return ebft_ce_coef * max(0.0, 1.0 - (step - warm_start_steps) / ce_decay_steps)
