"""Checks of loss, rewards, adapter, optimizer, data and saving."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ebft_ds.config.check_context import Note, Surroundings
from ebft_ds.config.checks_rollout import OBJECT_NAME
from ebft_ds.config.recipe import RecipeConfig


def check_loss(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Importance weights and KL."""
    loss = config.loss
    if loss.old_logprobs == "engine" and loss.vllm_importance_sampling_mode != "none":
        yield (
            f"old_logprobs: engine already corrects the mismatch by its ratio, and vllm_importance_sampling_mode: "
            f"{loss.vllm_importance_sampling_mode} would correct it twice; set vllm_importance_sampling_mode: none"
        )
    if loss.old_logprobs != "engine" and loss.vllm_importance_sampling_mode == "none" and config.rollout.max_staleness > 0:
        yield Note("asynchronous without any importance weight: stale samples count as if they were fresh")
    if loss.vllm_importance_sampling_cap < 1:
        yield Note("vllm_importance_sampling_cap below 1 also shrinks on-policy samples")
    if loss.beta > 0 and not config.peft.use_peft:
        yield Note("beta above 0 with full fine-tuning keeps the whole frozen model in memory, head included")


def check_iterations(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Several optimizer steps on each batch of rollouts."""
    loss, iterations = config.loss, config.loss.num_iterations
    if iterations == 1:
        if loss.old_logprobs == "recompute":
            yield (
                "old_logprobs: recompute needs num_iterations above 1: in the first step on a batch old and current log-probs are the "
                "same; set old_logprobs: current"
            )
        return
    if config.method.ebft_rl_coef == 0:
        yield f"num_iterations {iterations} uses rollouts again, and there are none with ebft_rl_coef: 0; set num_iterations: 1"
        return
    if loss.old_logprobs == "current":
        yield (
            f"num_iterations {iterations} needs the log-probs from before the batch's first step; set old_logprobs: recompute "
            "(or engine, with vllm_importance_sampling_mode: none)"
        )
    if config.checkpoint.save_steps % iterations:
        yield (
            f"save_steps {config.checkpoint.save_steps} is no multiple of num_iterations {iterations}: a checkpoint lies between batches, "
            "since a resume begins with a new one"
        )
    if config.checkpoint.save_steps and loss.warm_start_steps % iterations:
        yield (
            f"warm_start_steps {loss.warm_start_steps} is no multiple of num_iterations {iterations}: batches would not end where "
            "save_steps saves"
        )


def check_rewards(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Further objectives."""
    loss, functions = config.loss, len(config.loss.reward_funcs) + around.reward_functions
    further = len(loss.reward_models) + functions
    for name in loss.reward_funcs:
        if not OBJECT_NAME.match(name):
            yield f"reward_funcs: {name!r} is not of the form package.module:function"
    if loss.reward_weights is not None:
        if len(loss.reward_weights) != 1 + further:
            yield (
                f"reward_weights has {len(loss.reward_weights)} entries, {1 + further} are needed: "
                "feature matching first, then one per reward model, then one per reward function"
            )
        elif not any(loss.reward_weights):
            yield "reward_weights are all 0: every advantage would be 0"
    if loss.reward_model_token_budget and not loss.reward_models:
        yield "reward_model_token_budget needs reward_models"
    if functions and loss.reward_timeout >= config.engine.ddp_timeout:
        yield (
            f"reward_timeout {loss.reward_timeout:g} is not below ddp_timeout {config.engine.ddp_timeout:g}: the other ranks, which wait "
            "for rank 0's reward functions, would give up first"
        )
    if not further:
        return
    what = " and ".join(name for name, given in (("reward_models", loss.reward_models), ("reward_funcs", functions)) if given)
    if loss.advantage_estimator not in ("ebft_rloo", "group"):
        yield f"{what} work with advantage_estimator ebft_rloo or group, not {loss.advantage_estimator}"
    if loss.advantage_estimator == "ebft_rloo":
        if loss.scale_rewards != "none":
            yield f"{what} with ebft_rloo add weighted advantages unscaled; set scale_rewards: none, or advantage_estimator: group"
        if loss.multi_objective_aggregation != "sum_then_normalize":
            yield "multi_objective_aggregation: normalize_then_sum needs advantage_estimator: group"


def check_adapter(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Fields that need an adapter."""
    peft, optim = config.peft, config.optim
    if peft.use_peft:
        if not peft.lora_target_modules:
            yield "lora_target_modules is empty; name modules, or all-linear"
        return
    for name, value in (("use_dora", peft.use_dora), ("use_rslora", peft.use_rslora), ("loraplus_lr_ratio", optim.loraplus_lr_ratio)):
        if value:
            yield f"{name} needs use_peft: true"
    if peft.model_fields_set - {"use_peft", "use_dora", "use_rslora"}:
        yield Note("lora_* fields have no effect with use_peft: false")


def check_optimizer(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Schedule and parameter groups."""
    optim, cosine = config.optim, ("cosine", "cosine_with_min_lr")
    if optim.warmup_steps and optim.warmup_ratio:
        yield "warmup_steps and warmup_ratio are both set; keep one of them"
    if optim.lr_scheduler_type == "constant" and (optim.warmup_steps or optim.warmup_ratio):
        yield "lr_scheduler_type: constant ignores warm-up; use constant_with_warmup"
    if 0 < config.run.max_steps - config.loss.warm_start_steps <= optim.warmup_steps:
        steps = "EBFT steps" if config.MODE == "async" else "steps"
        yield (
            f"warmup_steps {optim.warmup_steps} covers all {steps} of max_steps {config.run.max_steps}: the learning rate is never reached"
        )
    if optim.cosine_min_lr_ratio is not None:
        if optim.lr_scheduler_type not in cosine:
            yield f"cosine_min_lr_ratio works with {' or '.join(cosine)}, not {optim.lr_scheduler_type}"
        if {"min_lr", "min_lr_rate"} & set(optim.lr_scheduler_kwargs):
            yield "cosine_min_lr_ratio and lr_scheduler_kwargs both give the floor; keep one of them"
    elif optim.lr_scheduler_type == "cosine_with_min_lr" and not {"min_lr", "min_lr_rate"} & set(optim.lr_scheduler_kwargs):
        yield "lr_scheduler_type: cosine_with_min_lr needs cosine_min_lr_ratio"
    if optim.embedding_lr is not None and optim.embedding_lr_scale is not None:
        yield "embedding_lr and embedding_lr_scale are both set; keep one of them"
    yield from _check_lr_groups(optim.lr_groups)


def _check_lr_groups(groups: list[dict[str, Any]]) -> Iterator[str]:
    names = [str(group.get("name", i)) for i, group in enumerate(groups)]
    if len(set(names)) < len(names):
        yield f"lr_groups: two groups have one name ({', '.join(names)})"
    for i, group in enumerate(groups):
        where = f"lr_groups[{i}]"
        strange = sorted(set(group) - {"name", "modules", "lr", "weight_decay"})
        if strange:
            yield f"{where}: unknown {', '.join(strange)}; a group has name, modules, lr, weight_decay"
        modules = group.get("modules")
        patterns = [modules] if isinstance(modules, str) else modules
        if not isinstance(patterns, list) or not patterns or not all(isinstance(item, str) for item in patterns):
            yield f"{where}: modules takes a name, a regular expression, or a list of them, not {modules!r}"
            continue
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{where}: {pattern!r} is not a regular expression: {error}"
        for key in ("lr", "weight_decay"):
            value = group.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                yield f"{where}: {key}: {value!r} is not a number of 0 or more"


def check_data(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Held-out prompts and field names."""
    data = config.data
    if data.eval_dataset and data.eval_holdout:
        yield "eval_dataset and eval_holdout are both set; keep one of them"
    if data.eval_split and not data.eval_dataset:
        yield "eval_split needs eval_dataset"
    if config.monitor.eval_steps and not (data.eval_dataset or data.eval_holdout or around.evaluation_given):
        yield "eval_steps needs held-out prompts: eval_dataset or eval_holdout"
    if data.prompt_field == data.ground_truth_field:
        yield f"prompt_field and ground_truth_field are both {data.prompt_field!r}"


def check_saving(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """What is kept of a run."""
    keep, run = config.checkpoint, config.run
    if not (keep.save_steps or keep.save_at_end or keep.export_final):
        yield "save_steps: 0, save_at_end: false and export_final: false together keep nothing of the run"
    if run.resume_from_checkpoint and run.overwrite_output_dir:
        yield "resume_from_checkpoint and overwrite_output_dir contradict each other; keep one of them"
