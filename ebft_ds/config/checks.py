"""Everything that concerns several fields, or a field and the world around it, checked in one place and reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ebft_ds.config import checks_method, checks_mode, checks_rollout, checks_training, checks_vllm
from ebft_ds.config.check_context import Note, Surroundings
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.errors import ConfigError

__all__ = ["CheckReport", "Note", "Surroundings", "check_config", "require_training_inputs"]


@dataclass
class CheckReport:
    """What was found."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Allowed, but worth knowing."""

    def raise_if_bad(self) -> None:
        """ConfigError listing all problems, if there are any."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def check_config(config: RecipeConfig, around: Surroundings | None = None) -> CheckReport:
    """All findings of all checks. Does not raise; `raise_if_bad` of the result does."""
    known = around or Surroundings()
    report = CheckReport()
    for check in _CHECKS[config.MODE]:
        for finding in check(config, known):
            (report.notes if isinstance(finding, Note) else report.problems).append(str(finding))
    return report


def require_training_inputs(config: RecipeConfig, *, data_given: bool = False) -> None:
    """ConfigError unless model, data and output folder are named; `data_given`: the training data came as an object."""
    needed = {
        "model_name_or_path": config.model.model_name_or_path,
        "train_dataset": config.data.train_dataset or data_given,
        "output_dir": config.run.output_dir,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise ConfigError(f"not set: {', '.join(missing)}; put it into the recipe or give {missing[0]}=... on the command line")


_Check = Callable[[RecipeConfig, Surroundings], Iterator[str]]
_SHARED: tuple[_Check, ...] = (
    checks_rollout.check_precision,
    checks_training.check_adapter,
    checks_training.check_optimizer,
    checks_training.check_data,
    checks_training.check_saving,
)
_CHECKS: dict[str, tuple[_Check, ...]] = {
    "async": (
        checks_mode.check_no_reward_fields,
        checks_method.check_batch,
        checks_method.check_group,
        checks_method.check_objective,
        checks_method.check_lengths,
        checks_method.check_layers,
        checks_rollout.check_rollout,
        checks_vllm.check_vllm,
        checks_training.check_loss,
        checks_training.check_iterations,
        checks_training.check_rewards,
        *_SHARED,
    ),
    "reward": (checks_mode.check_no_ebft_fields, checks_mode.check_reward, *_SHARED),
}
