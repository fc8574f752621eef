"""Fields of one mode in a recipe of another, and what a reward recipe needs."""

from __future__ import annotations

from collections.abc import Iterator

from ebft_ds.config.check_context import Surroundings
from ebft_ds.config.fields import FIELDS
from ebft_ds.config.recipe import RecipeConfig

_EBFT_SECTIONS = ("method", "rollout", "vllm", "loss")
_EBFT_FIELDS = ("ground_truth_field", "max_prompt_length", "max_reference_length", "overlong_prompts", "eval_max_prompts", "log_samples")
_EBFT_ENGINE_FIELDS = ("feature_model_name_or_path", "feature_deepspeed")


def check_no_reward_fields(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """EBFT has no use for the section `reward`."""
    changed = _changed(config, [name for name, spec in FIELDS.items() if spec.section == "reward"])
    if changed == ["torch_compile"]:
        yield "torch_compile: ZeRO-3's hooks break the graphs of the EBFT forwards; only mode: reward has it"
    elif changed:
        yield f"{', '.join(changed)}: only mode: reward reads the section reward; for reward models as objectives set reward_models"


def check_no_ebft_fields(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """A reward model has neither rollouts nor features. A resolved recipe states every field, so defaults pass."""
    names = [name for name, spec in FIELDS.items() if spec.section in _EBFT_SECTIONS]
    changed = _changed(config, [*names, *_EBFT_FIELDS, *_EBFT_ENGINE_FIELDS])
    if changed:
        yield f"{', '.join(changed)}: mode: reward does not read {'it' if len(changed) == 1 else 'them'}; leave out"


def check_reward(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Loss, stream and lengths of a reward model."""
    reward, data, run = config.reward, config.data, config.run
    if reward.label_smoothing and reward.reward_loss_type == "plackett_luce":
        yield "label_smoothing is of pairs: it does not work with reward_loss_type: plackett_luce"
    if "hinge_margin" in reward.model_fields_set and reward.reward_loss_type != "hinge" and reward.hinge_margin != 1.0:
        yield f"hinge_margin works with reward_loss_type: hinge, not {reward.reward_loss_type}"
    if reward.streaming:
        if run.max_steps < 0:
            yield "streaming: a stream has no known end; set max_steps"
        if data.eval_holdout:
            yield "eval_holdout needs rows by number, which a stream has not; set eval_dataset, or streaming: false"
        if data.max_train_rows:
            yield "max_train_rows needs rows by number, which a stream has not; set streaming: false"
    context = around.model.context_length if around.model is not None else 0
    if context and data.max_seq_length > context:
        yield f"max_seq_length {data.max_seq_length} is over the model's context of {context}; lower it"
    names = [reward.chosen_field, reward.rejected_field, reward.responses_field, data.prompt_field]
    if len(set(names)) < len(names):
        yield f"chosen_field, rejected_field, responses_field and prompt_field must differ: {', '.join(names)}"


def _changed(config: RecipeConfig, names: list[str]) -> list[str]:
    values = config.explicit()
    return [name for name in names if name in values and values[name] != FIELDS[name].default]
