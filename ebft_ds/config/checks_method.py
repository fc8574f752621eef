"""Checks of the method: batch and group sizes, objective, lengths, layers."""

from __future__ import annotations

from collections.abc import Iterator

from ebft_ds.config.check_context import Note, Surroundings
from ebft_ds.config.derived import global_batch, indivisible
from ebft_ds.config.recipe import RecipeConfig


def check_batch(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Batch sizes, steps, ranks."""
    if around.world_size is not None and global_batch(config, around.world_size) % config.rollout.num_generations:
        yield indivisible(config, around.world_size)
    if config.run.max_steps == 0:
        yield "max_steps: 0 trains nothing; -1 means num_train_epochs"
    if 0 < config.run.max_steps <= config.loss.warm_start_steps:
        yield (
            f"warm_start_steps {config.loss.warm_start_steps} leaves no EBFT step of max_steps {config.run.max_steps} "
            "(max_steps counts both); raise max_steps, lower warm_start_steps, or train on references alone with ebft_rl_coef: 0"
        )
    if config.run.seed < 0:
        yield f"seed: {config.run.seed} is negative; random generators take 0 and up"
    if around.accelerators and around.world_size and around.world_size > around.accelerators and config.run.num_processes:
        yield f"num_processes {config.run.num_processes} is more than this machine's {around.accelerators} GPU(s); one rank needs one"


def check_group(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """What a group of n completions allows."""
    n, method, loss = config.rollout.num_generations, config.method, config.loss
    if method.ebft_rl_coef == 0:
        return
    if n == 1:
        if method.ebft_diversity_coef > 0:
            yield "num_generations: 1 has no siblings for the diversity term; use 2 or more, or ebft_diversity_coef: 0"
        if loss.advantage_estimator != "reinforce":
            yield f"num_generations: 1 has no siblings for the baseline of {loss.advantage_estimator}; use 2 or more, or reinforce"
        if method.ebft_use_whitening:
            yield "num_generations: 1 cannot be whitened (one feature has no second moment to divide out); use ebft_use_whitening: false"
    if around.model and around.model.hidden_size and method.ebft_use_whitening:
        width = around.model.hidden_size * len(method.ebft_feature_layers) * (3 if method.ebft_embed_method == "concat" else 1)
        if n > width:
            yield Note(f"num_generations {n} exceeds the feature width {width}: whitened features cannot be orthogonal")
    if method.diversity_importance == "sequence" and config.rollout.max_staleness == 0:
        yield Note("diversity_importance: sequence changes nothing in a synchronous run (max_staleness: 0)")
    if config.monitor.eval_num_generations == 1:
        yield Note("eval_num_generations: 1 leaves diversity and the unbiased feature loss of evaluations undefined")


def check_objective(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Is something trained, and do its coefficients fit together?"""
    method, loss = config.method, config.loss
    feature_weight = abs(method.ebft_alignment_coef) + method.ebft_diversity_coef
    if method.ebft_rl_coef == 0 and method.ebft_ce_coef == 0:
        yield "ebft_rl_coef and ebft_ce_coef are both 0: nothing is trained"
    elif method.ebft_rl_coef > 0 and feature_weight == 0 and not (loss.reward_models or loss.reward_funcs or around.reward_functions):
        yield (
            "ebft_alignment_coef and ebft_diversity_coef are both 0 and there are no reward_models or reward_funcs: every reward is 0. "
            "For references alone set ebft_rl_coef: 0"
        )
    if method.ebft_alignment_coef < 0:
        yield Note("ebft_alignment_coef is negative: completions are pushed away from the references")
    if loss.ce_decay_steps and method.ebft_ce_coef == 0:
        yield "ce_decay_steps needs ebft_ce_coef above 0"
    if loss.ce_decay_steps and method.ebft_rl_coef == 0:
        yield "ce_decay_steps lets the only objective (ebft_rl_coef is 0) fade to nothing"
    if loss.rl_warmup_start != 1.0 and loss.rl_warmup_steps == 0:
        yield f"rl_warmup_start: {loss.rl_warmup_start} needs rl_warmup_steps"
    if loss.warm_start_steps == 0 and (loss.warm_start_learning_rate or loss.warm_start_batch_size):
        yield Note("warm_start_learning_rate and warm_start_batch_size have no effect with warm_start_steps: 0")
    if method.ebft_whitening_rtol is not None and method.ebft_whitening_rtol >= 1:
        yield f"ebft_whitening_rtol: {method.ebft_whitening_rtol} would drop every singular value; it is a share of the largest, below 1"


def check_lengths(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Prompt, completion and context."""
    data, completion = config.data, config.rollout.max_completion_length
    if completion >= data.max_seq_length:
        yield f"max_completion_length {completion} leaves no room for a prompt in max_seq_length {data.max_seq_length}"
    elif data.max_prompt_length and data.max_prompt_length + completion > data.max_seq_length:
        yield f"max_prompt_length {data.max_prompt_length} + max_completion_length {completion} exceed max_seq_length {data.max_seq_length}"
    if data.max_reference_length and data.max_reference_length >= data.max_seq_length:
        yield f"max_reference_length {data.max_reference_length} leaves no room for a prompt in max_seq_length {data.max_seq_length}"
    if config.method.scoring_token_budget < data.max_seq_length:
        yield (
            f"scoring_token_budget {config.method.scoring_token_budget} is below max_seq_length {data.max_seq_length}: "
            "the longest sequence would not fit"
        )
    if config.run.train_token_budget is not None and config.run.train_token_budget < data.max_seq_length:
        yield (
            f"train_token_budget {config.run.train_token_budget} is below max_seq_length {data.max_seq_length}: "
            "the longest sequence would not fit"
        )
    if around.model and 0 < around.model.context_length < data.max_seq_length:
        yield f"max_seq_length {data.max_seq_length} is longer than the model's context of {around.model.context_length} tokens"


def check_layers(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Feature layers."""
    layers = config.method.ebft_feature_layers
    if not layers:
        yield "ebft_feature_layers is empty; name at least one layer, e.g. [0.25, 0.5, 0.75]"
    for value in layers:
        if isinstance(value, float) and not 0.0 < value <= 1.0:
            yield f"ebft_feature_layers: {value} is outside (0, 1]; fractions are depths, whole numbers are layers"
        elif isinstance(value, int) and value < 1:
            yield f"ebft_feature_layers: {value}: layers count from 1"
        elif isinstance(value, int) and around.model and around.model.num_layers and value > around.model.num_layers:
            yield f"ebft_feature_layers: {value}: the model has {around.model.num_layers} layers"
    if len(set(layers)) < len(layers):
        yield f"ebft_feature_layers: {layers} names a layer twice"
    if any(isinstance(value, int) and value == 1 for value in layers):
        yield Note("ebft_feature_layers: 1 is the first layer; the last one is the fraction 1.0")
