"""Everything that concerns several fields, or a field and the world around it, checked in one place and reported together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebft_ds.config.async_ebft import AsyncEBFTConfig
from ebft_ds.config.derived import global_batch, indivisible
from ebft_ds.config.fields import nearest
from ebft_ds.config.model_facts import ModelFacts
from ebft_ds.errors import ConfigError

GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids")
"""What generation_kwargs may hold."""

_TARGET = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


@dataclass(frozen=True)
class Surroundings:
    """What a check may know beside the recipe; None: unknown, and what depends on it is not checked."""

    world_size: int | None = None
    accelerators: int | None = None
    """GPUs of this machine; 0: the run is on the CPU."""
    model: ModelFacts | None = None


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


class Note(str):
    """A finding that does not stop the run."""

    __slots__ = ()


def check_config(config: AsyncEBFTConfig, around: Surroundings | None = None) -> CheckReport:
    """All findings of all checks. Does not raise; `raise_if_bad` of the result does."""
    known = around or Surroundings()
    report = CheckReport()
    for check in _CHECKS:
        for finding in check(config, known):
            (report.notes if isinstance(finding, Note) else report.problems).append(str(finding))
    return report


def require_training_inputs(config: AsyncEBFTConfig, *, data_given: bool = False) -> None:
    """ConfigError unless model, data and output folder are named; `data_given`: the training data came as an object."""
    needed = {
        "model_name_or_path": config.model.model_name_or_path,
        "train_dataset": config.data.train_dataset or data_given,
        "output_dir": config.run.output_dir,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise ConfigError(f"not set: {', '.join(missing)}; put it into the recipe or give {missing[0]}=... on the command line")


def _check_batch(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    if around.world_size is not None and global_batch(config, around.world_size) % config.rollout.num_generations:
        yield indivisible(config, around.world_size)
    if config.run.max_steps == 0:
        yield "max_steps: 0 trains nothing; -1 means num_train_epochs, and `ebft-ds eval` evaluates"
    if 0 < config.run.max_steps <= config.loss.warm_start_steps:
        yield (
            f"warm_start_steps {config.loss.warm_start_steps} leaves no EBFT step of max_steps {config.run.max_steps} "
            "(max_steps counts both); raise max_steps, lower warm_start_steps, or train on references alone with ebft_rl_coef: 0"
        )
    if config.run.seed < 0:
        yield f"seed: {config.run.seed} is negative; random generators take 0 and up"
    if around.accelerators and around.world_size and around.world_size > around.accelerators and config.run.num_processes:
        yield f"num_processes {config.run.num_processes} is more than this machine's {around.accelerators} GPU(s); one rank needs one"


def _check_group(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
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


def _check_objective(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    method, loss = config.method, config.loss
    feature_weight = abs(method.ebft_alignment_coef) + method.ebft_diversity_coef
    if method.ebft_rl_coef == 0 and method.ebft_ce_coef == 0:
        yield "ebft_rl_coef and ebft_ce_coef are both 0: nothing is trained"
    elif method.ebft_rl_coef > 0 and feature_weight == 0 and not loss.reward_funcs:
        yield (
            "ebft_alignment_coef and ebft_diversity_coef are both 0 and there are no reward_funcs: every reward is 0. "
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


def _check_lengths(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
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
    if around.model and 0 < around.model.context_length < data.max_seq_length:
        yield f"max_seq_length {data.max_seq_length} is longer than the model's context of {around.model.context_length} tokens"


def _check_layers(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
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


def _check_precision(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    model, rollout = config.model, config.rollout
    on_cpu = around.accelerators == 0
    if on_cpu and "float16" in (model.dtype, rollout.rollout_dtype):
        yield "float16 does not train on a CPU; use dtype: float32"
    if on_cpu and model.dtype == "bfloat16":
        yield Note("bfloat16 is slow on most CPUs; dtype: float32 is the usual choice there")
    if model.attn_implementation == "flash_attention_2" and (on_cpu or model.dtype == "float32"):
        yield "attn_implementation: flash_attention_2 needs a GPU and bfloat16 or float16; use sdpa"
    checkpointing = "gradient_checkpointing_kwargs" in model.model_fields_set
    if checkpointing and not model.gradient_checkpointing:
        yield Note("gradient_checkpointing_kwargs has no effect with gradient_checkpointing: false")
    options = ("use_reentrant", "preserve_rng_state", "determinism_check")
    strange = sorted(set(model.gradient_checkpointing_kwargs) - set(options))
    if strange:
        yield f"gradient_checkpointing_kwargs: {', '.join(strange)} is not an option; there are {', '.join(options)}"
    if model.trust_remote_code:
        yield Note("trust_remote_code runs Python code from the checkpoint")
    if model.model_revision and model.model_name_or_path and Path(model.model_name_or_path).is_dir():
        yield "model_revision has no meaning for a model folder; remove it"


def _check_rollout(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    rollout, interval = config.rollout, config.rollout.vllm_merge_check_interval
    if rollout.max_staleness < interval - 1:
        yield (
            f"max_staleness {rollout.max_staleness} is below vllm_merge_check_interval {interval} - 1: the weights are "
            f"{interval - 1} steps old at best, so every group would be dropped; raise the one or lower the other"
        )
    if rollout.rollout_loop is not None and not _TARGET.match(rollout.rollout_loop):
        yield f"rollout_loop: {rollout.rollout_loop!r} is not of the form package.module:Class"
    if rollout.rollout_loop_kwargs and rollout.rollout_loop is None:
        yield "rollout_loop_kwargs needs rollout_loop"
    if config.method.ebft_rl_coef > 0 and rollout.rollout_loop is None:
        yield from _check_device(rollout.rollout_device, around)
    yield from _check_sampling(config)


def _check_device(device: str | None, around: Surroundings) -> Iterator[str]:
    if around.accelerators and device is None:
        yield "rollout_device is needed on a machine with GPUs (e.g. cuda:1, or cpu): the engine must not share a rank's GPU unasked"
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?|xpu(:\d+)?|npu(:\d+)?", device):
        yield f"rollout_device: {device!r} is not a device; examples: cpu, cuda:0"
    elif device is not None and device.startswith("cuda") and around.accelerators is not None:
        index = int(device.partition(":")[2] or 0)
        if index >= around.accelerators:
            yield f"rollout_device: {device}: this machine has {around.accelerators} GPU(s)"


def _check_sampling(config: AsyncEBFTConfig) -> Iterator[str]:
    rollout = config.rollout
    stated: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "stop_token_ids": rollout.stop_token_ids,
    }
    for key, value in rollout.generation_kwargs.items():
        if key not in GENERATION_KEYS:
            guess = nearest(key, GENERATION_KEYS)
            yield f"generation_kwargs: {key} is not supported" + (
                f"; did you mean {guess}?" if guess else f"; there are {', '.join(GENERATION_KEYS)}"
            )
        elif key in rollout.model_fields_set and stated[key] != value:
            yield f"generation_kwargs.{key}: {value!r} contradicts {key}: {stated[key]!r}; keep one of them"
    if rollout.stop_token_ids is not None and (not rollout.stop_token_ids or min(rollout.stop_token_ids) < 0):
        yield "stop_token_ids is empty or holds a negative id; null takes the generation configuration's EOS ids"


def _check_loss(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    loss = config.loss
    if loss.old_logprobs == "engine" and loss.vllm_importance_sampling_mode != "none":
        yield (
            f"old_logprobs: engine already corrects the mismatch by its ratio, and vllm_importance_sampling_mode: "
            f"{loss.vllm_importance_sampling_mode} would correct it twice; set vllm_importance_sampling_mode: none"
        )
    if loss.old_logprobs == "current" and loss.vllm_importance_sampling_mode == "none" and config.rollout.max_staleness > 0:
        yield Note("asynchronous without any importance weight: stale samples count as if they were fresh")
    if loss.vllm_importance_sampling_cap < 1:
        yield Note("vllm_importance_sampling_cap below 1 also shrinks on-policy samples")
    if loss.beta > 0 and not config.peft.use_peft:
        yield Note("beta above 0 with full fine-tuning keeps the whole frozen model in memory, head included")


def _check_rewards(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    loss, count = config.loss, 1 + len(config.loss.reward_funcs)
    for name in loss.reward_funcs:
        if not _TARGET.match(name):
            yield f"reward_funcs: {name!r} is not of the form package.module:function"
    if loss.reward_weights is not None:
        if len(loss.reward_weights) != count:
            yield (
                f"reward_weights has {len(loss.reward_weights)} entries, {count} are needed: "
                "feature matching first, then one per reward function"
            )
        elif not any(loss.reward_weights):
            yield "reward_weights are all 0: every advantage would be 0"
    if not loss.reward_funcs:
        return
    if loss.advantage_estimator not in ("ebft_rloo", "group"):
        yield f"reward_funcs work with advantage_estimator ebft_rloo or group, not {loss.advantage_estimator}"
    if loss.advantage_estimator == "ebft_rloo":
        if loss.scale_rewards != "none":
            yield "reward_funcs with ebft_rloo add weighted advantages unscaled; set scale_rewards: none, or advantage_estimator: group"
        if loss.multi_objective_aggregation != "sum_then_normalize":
            yield "multi_objective_aggregation: normalize_then_sum needs advantage_estimator: group"


def _check_adapter(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
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


def _check_optimizer(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    optim, cosine = config.optim, ("cosine", "cosine_with_min_lr")
    if optim.warmup_steps and optim.warmup_ratio:
        yield "warmup_steps and warmup_ratio are both set; keep one of them"
    if optim.lr_scheduler_type == "constant" and (optim.warmup_steps or optim.warmup_ratio):
        yield "lr_scheduler_type: constant ignores warm-up; use constant_with_warmup"
    if 0 < config.run.max_steps - config.loss.warm_start_steps <= optim.warmup_steps:
        yield (
            f"warmup_steps {optim.warmup_steps} covers all EBFT steps of max_steps {config.run.max_steps}: "
            "the learning rate is never reached"
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


def _check_data(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    data = config.data
    if data.eval_dataset and data.eval_holdout:
        yield "eval_dataset and eval_holdout are both set; keep one of them"
    if data.eval_split and not data.eval_dataset:
        yield "eval_split needs eval_dataset"
    if config.monitor.eval_steps and not (data.eval_dataset or data.eval_holdout):
        yield "eval_steps needs held-out prompts: eval_dataset or eval_holdout"
    if data.prompt_field == data.ground_truth_field:
        yield f"prompt_field and ground_truth_field are both {data.prompt_field!r}"


def _check_saving(config: AsyncEBFTConfig, around: Surroundings) -> Iterator[str]:
    keep, run = config.checkpoint, config.run
    if not (keep.save_steps or keep.save_at_end or keep.export_final):
        yield "save_steps: 0, save_at_end: false and export_final: false together keep nothing of the run"
    if run.resume_from_checkpoint and run.overwrite_output_dir:
        yield "resume_from_checkpoint and overwrite_output_dir contradict each other; keep one of them"


_CHECKS: tuple[Callable[[AsyncEBFTConfig, Surroundings], Iterator[str]], ...] = (
    _check_batch,
    _check_group,
    _check_objective,
    _check_lengths,
    _check_layers,
    _check_precision,
    _check_rollout,
    _check_loss,
    _check_rewards,
    _check_adapter,
    _check_optimizer,
    _check_data,
    _check_saving,
)
