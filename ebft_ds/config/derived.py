"""Numbers that follow from a recipe, the world size and the number of rows. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.config.sections import RunSection
from ebft_ds.errors import ConfigError


@dataclass(frozen=True)
class DerivedNumbers:
    """Sizes of one run. "Step" is an optimizer step."""

    world_size: int
    global_batch: int
    """Completions trained on in one step, over all ranks."""
    num_generations: int
    groups_per_step: int
    """Prompts (= references) in one step."""
    micro_batches_per_rank: int
    completions_per_rank: int
    max_tokens_per_step: int
    """Upper bound: every completion at max_seq_length."""
    admission_bound: int
    """Most groups in flight or waiting: (S // num_iterations + 1) x groups_per_step."""
    num_iterations: int
    """EBFT steps on each batch of groups."""
    train_token_budget: int
    """Most tokens in one packed micro-batch of the policy."""
    staleness_bound: int
    """Oldest allowed age of a trained token, in steps."""
    merge_check_interval: int
    max_prompt_length: int
    warm_start_steps: int
    warm_start_references: int
    """References in one warm-start step."""
    rows: int | None
    """Usable training rows; None when unknown."""
    steps_per_epoch: int | None
    """EBFT steps in one pass over the prompts, rounded up to whole batches."""
    steps: int | None
    """Steps of the whole run, warm start included; None when neither max_steps nor the rows are known."""
    epochs: float | None
    """Passes over the prompts by the EBFT steps."""
    warmup_steps: int | None
    """Learning-rate warm-up, counted after the warm start."""

    @property
    def ebft_steps(self) -> int | None:
        """Steps after the warm start."""
        return None if self.steps is None else self.steps - self.warm_start_steps

    def table(self) -> list[tuple[str, str]]:
        """(label, value) rows for a terminal."""
        unknown = "unknown (no data read)"
        shape = f"{self.groups_per_step} prompts x {self.num_generations}"
        return [
            ("ranks", str(self.world_size)),
            ("global batch", f"{self.global_batch} completions ({shape})"),
            (
                "micro-batches per rank and step",
                f"{self.micro_batches_per_rank} x {self.completions_per_rank // self.micro_batches_per_rank}",
            ),
            ("tokens in a packed micro-batch, at most", f"{self.train_token_budget:,}"),
            ("tokens per step, at most", f"{self.max_tokens_per_step:,}"),
            ("longest prompt", f"{self.max_prompt_length} tokens"),
            ("steps on each batch", str(self.num_iterations)),
            ("staleness bound", f"{self.staleness_bound} steps" + (" (synchronous)" if self.staleness_bound == 0 else "")),
            ("admission bound", f"{self.admission_bound} groups in flight or waiting"),
            ("weight pushes", f"every {self.merge_check_interval} step(s)"),
            ("warm start", f"{self.warm_start_steps} steps x {self.warm_start_references} references"),
            ("training rows", f"{self.rows:,}" if self.rows is not None else unknown),
            ("steps per pass over the prompts", f"{self.steps_per_epoch:,}" if self.steps_per_epoch is not None else unknown),
            ("steps", f"{self.steps:,}" if self.steps is not None else unknown),
            ("passes over the prompts", f"{self.epochs:.3g}" if self.epochs is not None else unknown),
            ("learning-rate warm-up", f"{self.warmup_steps} steps" if self.warmup_steps is not None else unknown),
        ]


def derive(config: RecipeConfig, world_size: int, rows: int | None = None) -> DerivedNumbers:
    """The numbers of a run over `world_size` ranks with `rows` usable training rows.

    Errors: ConfigError if the batch numbers do not divide (`checks.check_config` reports it beside everything else).
    """
    batch = global_batch(config, world_size)
    n = config.rollout.num_generations
    if batch % n:
        raise ConfigError(indivisible(config, world_size))
    groups = batch // n
    warm = config.loss.warm_start_steps
    iterations = iterations_per_batch(config)
    ebft_steps = _ebft_steps(config, groups, rows)
    return DerivedNumbers(
        world_size=world_size,
        global_batch=batch,
        num_generations=n,
        groups_per_step=groups,
        micro_batches_per_rank=config.run.gradient_accumulation_steps,
        completions_per_rank=batch // world_size,
        max_tokens_per_step=batch * config.data.max_seq_length,
        admission_bound=(config.rollout.max_staleness // iterations + 1) * groups,
        num_iterations=iterations,
        train_token_budget=train_token_budget(config.run, max_seq_length=config.data.max_seq_length),
        staleness_bound=config.rollout.max_staleness,
        merge_check_interval=config.rollout.vllm_merge_check_interval,
        max_prompt_length=prompt_limit(config),
        warm_start_steps=warm,
        warm_start_references=config.loss.warm_start_batch_size or batch,
        rows=rows,
        steps_per_epoch=math.ceil(rows / groups) * iterations if rows is not None else None,
        steps=ebft_steps + warm if ebft_steps is not None else None,
        epochs=math.ceil(ebft_steps / iterations) * groups / rows if rows and ebft_steps is not None else None,
        warmup_steps=_warmup(config, ebft_steps),
    )


def global_batch(config: RecipeConfig, world_size: int) -> int:
    """Completions in one optimizer step over all ranks."""
    return config.run.per_device_train_batch_size * config.run.gradient_accumulation_steps * world_size


def iterations_per_batch(config: RecipeConfig) -> int:
    """EBFT steps on each batch of groups; steps on references alone (`ebft_rl_coef: 0`) always take new ones."""
    return config.loss.num_iterations if config.method.ebft_rl_coef > 0 else 1


def train_token_budget(run: RunSection, *, max_seq_length: int) -> int:
    """Most tokens in one packed micro-batch of the policy: `train_token_budget`, or what a padded one could hold."""
    return run.train_token_budget or run.per_device_train_batch_size * max_seq_length


def indivisible(config: RecipeConfig, world_size: int) -> str:
    """The message for a batch that is no whole number of groups, with the nearest batch that is."""
    n, run = config.rollout.num_generations, config.run
    unit = run.gradient_accumulation_steps * world_size
    step = n // math.gcd(n, unit)
    suggestion = max(step, round(run.per_device_train_batch_size / step) * step)
    return (
        f"per_device_train_batch_size {run.per_device_train_batch_size} x gradient_accumulation_steps "
        f"{run.gradient_accumulation_steps} x {world_size} rank(s) = {global_batch(config, world_size)} completions is no multiple of "
        f"num_generations {n}; for example per_device_train_batch_size: {suggestion}"
    )


def prompt_limit(config: RecipeConfig) -> int:
    """Longest prompt in tokens: what is left of max_seq_length beside a completion."""
    return config.data.max_prompt_length or config.data.max_seq_length - config.rollout.max_completion_length


def _ebft_steps(config: RecipeConfig, groups: int, rows: int | None) -> int | None:
    if config.run.max_steps >= 0:
        return max(0, config.run.max_steps - config.loss.warm_start_steps)
    return math.ceil(config.run.num_train_epochs * rows / groups) * iterations_per_batch(config) if rows is not None else None


def _warmup(config: RecipeConfig, ebft_steps: int | None) -> int | None:
    if config.optim.warmup_steps or not config.optim.warmup_ratio:
        return config.optim.warmup_steps
    return round(config.optim.warmup_ratio * ebft_steps) if ebft_steps is not None else None
