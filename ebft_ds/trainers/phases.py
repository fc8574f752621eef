"""What kind of step each one is: on references alone or on completions, with which coefficients, and which batch it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from ebft_ds.config.derived import DerivedNumbers
from ebft_ds.config.sections import LossSection, MethodSection
from ebft_ds.policy.coefficients import ce_coefficient, in_warm_start, rl_coefficient


@dataclass(frozen=True)
class Coefficients:
    """Weights of the step's two losses."""

    rl: float
    ce: float


@dataclass(frozen=True)
class Phases:
    """Pure functions of the step, counted from 0."""

    loss: LossSection
    method: MethodSection

    def coefficients(self, step: int) -> Coefficients:
        loss, method = self.loss, self.method
        rl = rl_coefficient(
            step,
            warm_start_steps=loss.warm_start_steps,
            ebft_rl_coef=method.ebft_rl_coef,
            rl_warmup_start=loss.rl_warmup_start,
            rl_warmup_steps=loss.rl_warmup_steps,
        )
        ce = ce_coefficient(
            step, warm_start_steps=loss.warm_start_steps, ebft_ce_coef=method.ebft_ce_coef, ce_decay_steps=loss.ce_decay_steps
        )
        return Coefficients(rl, ce)

    def rolls_out(self, step: int) -> bool:
        """Whether a step trains on completions (else: on references alone)."""
        return self.method.ebft_rl_coef > 0 and not in_warm_start(step, warm_start_steps=self.loss.warm_start_steps)

    def reference_count(self, step: int, derived: DerivedNumbers) -> int:
        """References of a step that trains on nothing else."""
        warm = in_warm_start(step, warm_start_steps=self.loss.warm_start_steps)
        return derived.warm_start_references if warm else derived.groups_per_step

    def batch_end(self, step: int) -> int:
        """The first step after this one that takes new groups.

        Batches begin at fixed steps, also after a resume in the middle of one: so checkpoints go on lying between them.
        """
        iterations = self.loss.num_iterations
        return step + iterations - (step - self.loss.warm_start_steps) % iterations
