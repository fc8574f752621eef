"""Cross-field checks: each refusal says what is wrong, and all are reported together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.checks import Surroundings, check_config, require_training_inputs
from ebft_ds.config.derived import derive, global_batch
from ebft_ds.config.memory import estimate_memory
from ebft_ds.config.model_facts import facts_from_config
from ebft_ds.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
FACTS = facts_from_config(LLAMA)
CPU = Surroundings(world_size=2, accelerators=0, model=FACTS)


def problems(around: Surroundings = CPU, **fields: Any) -> str:
    return "\n".join(check_config(AsyncEBFTConfig(**{"dtype": "float32", **fields}), around).problems)


def test_defaults_are_fine() -> None:
    assert problems() == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_generations": 3}, "16 completions is no multiple of num_generations 3"),
        ({"num_generations": 1}, "no siblings for the diversity term"),
        ({"num_generations": 1, "ebft_diversity_coef": 0.0}, "no siblings for the baseline of ebft_rloo"),
        ({"num_generations": 1}, "cannot be whitened"),
        ({"max_completion_length": 2048}, "leaves no room for a prompt"),
        ({"max_prompt_length": 2000}, "exceed max_seq_length"),
        ({"max_seq_length": 4096}, "longer than the model's context of 2048"),
        ({"scoring_token_budget": 100}, "the longest sequence would not fit"),
        ({"train_token_budget": 2047}, "train_token_budget 2047 is below max_seq_length 2048"),
        ({"num_iterations": 2}, "set old_logprobs: recompute"),
        ({"old_logprobs": "recompute"}, "set old_logprobs: current"),
        ({"num_iterations": 2, "old_logprobs": "engine"}, "correct it twice"),
        ({"num_iterations": 2, "old_logprobs": "recompute", "save_steps": 3}, "no multiple of num_iterations 2"),
        ({"num_iterations": 2, "old_logprobs": "recompute", "save_steps": 4, "warm_start_steps": 1}, "batches would not end"),
        ({"num_iterations": 2, "ebft_rl_coef": 0.0, "ebft_ce_coef": 1.0}, "set num_iterations: 1"),
        ({"ebft_feature_layers": [0.0]}, "outside (0, 1]"),
        ({"ebft_feature_layers": [1.5]}, "outside (0, 1]"),
        ({"ebft_feature_layers": [-0.1]}, "outside (0, 1]"),
        ({"ebft_feature_layers": [0]}, "layers count from 1"),
        ({"ebft_feature_layers": [5]}, "the model has 4 layers"),
        ({"ebft_feature_layers": []}, "is empty"),
        ({"ebft_feature_layers": [0.5, 0.5]}, "twice"),
        ({"ebft_rl_coef": 0.0}, "nothing is trained"),
        ({"ebft_alignment_coef": 0.0, "ebft_diversity_coef": 0.0}, "every reward is 0"),
        ({"ce_decay_steps": 5}, "ce_decay_steps needs ebft_ce_coef"),
        ({"rl_warmup_start": 0.1}, "needs rl_warmup_steps"),
        ({"dtype": "float16"}, "float16 does not train on a CPU"),
        ({"attn_implementation": "flash_attention_2"}, "needs a GPU"),
        ({"vllm_merge_check_interval": 4}, "max_staleness 1 is below vllm_merge_check_interval 4 - 1"),
        ({"old_logprobs": "engine"}, "correct it twice"),
        ({"reward_funcs": ["m:f"], "advantage_estimator": "rloo"}, "ebft_rloo or group, not rloo"),
        ({"reward_funcs": ["m:f"], "scale_rewards": "group"}, "unscaled"),
        ({"reward_funcs": ["m:f"], "reward_weights": [1.0]}, "2 are needed"),
        ({"reward_models": ["r"], "advantage_estimator": "reinforce"}, "reward_models work with"),
        ({"reward_models": ["r"], "reward_funcs": ["m:f"], "scale_rewards": "group"}, "reward_models and reward_funcs with ebft_rloo"),
        ({"reward_models": ["r"], "reward_funcs": ["m:f"], "reward_weights": [1.0, 1.0]}, "3 are needed"),
        ({"reward_model_token_budget": 512}, "needs reward_models"),
        ({"reward_funcs": ["m:f"], "reward_timeout": 1800.0}, "not below ddp_timeout"),
        ({"reward_funcs": ["not a function"]}, "package.module:function"),
        ({"reward_weights": [0.0]}, "all 0"),
        ({"use_dora": True}, "use_dora needs use_peft"),
        ({"use_rslora": True}, "use_rslora needs use_peft"),
        ({"loraplus_lr_ratio": 16.0}, "loraplus_lr_ratio needs use_peft"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "both set"),
        ({"warmup_steps": 5, "lr_scheduler_type": "constant"}, "ignores warm-up"),
        ({"warmup_steps": 20, "max_steps": 20}, "never reached"),
        ({"cosine_min_lr_ratio": 0.1}, "works with cosine"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs cosine_min_lr_ratio"),
        ({"embedding_lr": 1e-4, "embedding_lr_scale": 0.1}, "both set"),
        ({"lr_groups": [{"modules": "lm_head", "learning_rate": 1.0}]}, "unknown learning_rate"),
        ({"lr_groups": [{"name": "a", "modules": "("}]}, "not a regular expression"),
        ({"lr_groups": [{"name": "a"}]}, "modules takes a name"),
        ({"max_steps": 20, "warm_start_steps": 20}, "leaves no EBFT step"),
        ({"max_steps": 0}, "trains nothing"),
        ({"generation_kwargs": {"repetition_penalty": 1.1}}, "repetition_penalty is not supported"),
        ({"generation_kwargs": {"top_p": 0.5}, "top_p": 0.9}, "contradicts top_p"),
        ({"stop_token_ids": []}, "stop_token_ids is empty"),
        ({"gradient_checkpointing_kwargs": {"use_reentrent": True}}, "use_reentrent is not an option"),
        ({"rollout_loop": "module.Class"}, "package.module:Class"),
        ({"rollout_loop_kwargs": {"a": 1}}, "needs rollout_loop"),
        ({"rollout_device": "gpu"}, "is not a device"),
        ({"eval_dataset": "a", "eval_holdout": 3}, "both set"),
        ({"eval_steps": 5}, "needs held-out prompts"),
        ({"save_at_end": False, "export_final": False}, "keep nothing"),
        ({"resume_from_checkpoint": "auto", "overwrite_output_dir": True}, "contradict"),
        ({"seed": -1}, "negative"),
        ({"ebft_whitening_rtol": 1.0}, "every singular value"),
    ],
)
def test_refusals(fields: dict[str, Any], said: str) -> None:
    assert said in problems(**fields)


def test_one_sample_is_fine_with_reinforce_alone() -> None:
    fields = {"num_generations": 1, "ebft_diversity_coef": 0.0, "ebft_use_whitening": False, "advantage_estimator": "reinforce"}
    assert problems(**fields) == ""


@pytest.mark.parametrize("how", [{"old_logprobs": "recompute"}, {"old_logprobs": "engine", "vllm_importance_sampling_mode": "none"}])
def test_a_batch_may_be_used_more_than_once(how: dict[str, Any]) -> None:
    assert problems(num_iterations=3, save_steps=6, warm_start_steps=3, **how) == ""


def test_references_alone_need_no_group() -> None:
    assert problems(ebft_rl_coef=0.0, ebft_ce_coef=1.0, num_generations=1) == ""


def test_all_problems_come_together() -> None:
    found = problems(num_generations=1, ebft_feature_layers=[2.0], use_dora=True)
    assert len(found.splitlines()) == 5


def test_accelerators_ask_for_a_rollout_device() -> None:
    around = replace(CPU, accelerators=2)
    assert "rollout_device is needed" in problems(around)
    assert "this machine has 2" in problems(around, rollout_device="cuda:2")
    assert problems(around, rollout_device="cuda:1") == ""
    assert "num_processes 4 is more" in problems(replace(around, world_size=4), rollout_device="cpu", num_processes=4)


def test_notes_do_not_refuse() -> None:
    report = check_config(AsyncEBFTConfig(dtype="bfloat16", trust_remote_code=True), CPU)
    assert report.problems == []
    assert len(report.notes) == 2


def test_whitening_wider_than_the_features_is_noted() -> None:
    narrow = replace(CPU, model=facts_from_config({**LLAMA, "hidden_size": 2}))
    report = check_config(AsyncEBFTConfig(dtype="float32", num_generations=16, ebft_feature_layers=[0.5]), narrow)
    assert any("exceeds the feature width 2" in note for note in report.notes)


def test_training_inputs_are_named() -> None:
    with pytest.raises(ConfigError, match="not set: train_dataset, output_dir"):
        require_training_inputs(AsyncEBFTConfig(model_name_or_path="m"))


def test_suggested_batch_divides() -> None:
    config = AsyncEBFTConfig(per_device_train_batch_size=3, gradient_accumulation_steps=2, num_generations=8)
    with pytest.raises(ConfigError) as caught:
        derive(config, world_size=2)
    suggestion = int(str(caught.value).rpartition(": ")[2])
    derive(config.replace(per_device_train_batch_size=suggestion), world_size=2)


@given(
    micro=st.integers(1, 8),
    steps=st.integers(1, 4),
    world=st.integers(1, 4),
    n=st.integers(1, 8),
    rows=st.integers(1, 500),
    s=st.integers(0, 4),
    mu=st.integers(1, 3),
)
def test_derived_numbers_hang_together(micro: int, steps: int, world: int, n: int, rows: int, s: int, mu: int) -> None:
    config = AsyncEBFTConfig(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        num_generations=n,
        max_staleness=s,
        num_train_epochs=2,
        num_iterations=mu,
    )
    if global_batch(config, world) % n:
        with pytest.raises(ConfigError, match="no multiple"):
            derive(config, world, rows)
        return
    numbers = derive(config, world, rows)
    assert numbers.groups_per_step * n == numbers.global_batch == micro * steps * world
    assert numbers.completions_per_rank * world == numbers.global_batch
    assert numbers.admission_bound == (s // mu + 1) * numbers.groups_per_step
    assert numbers.train_token_budget == micro * config.data.max_seq_length
    assert numbers.steps is not None
    batches, over = divmod(numbers.steps, mu)
    assert over == 0
    assert batches * numbers.groups_per_step >= 2 * rows > (batches - 1) * numbers.groups_per_step
    assert numbers.epochs == pytest.approx(batches * numbers.groups_per_step / rows)
    assert numbers.steps_per_epoch is not None
    assert (numbers.steps_per_epoch // mu) * numbers.groups_per_step >= rows


def test_max_steps_counts_the_warm_start() -> None:
    numbers = derive(AsyncEBFTConfig(max_steps=20, warm_start_steps=5, warmup_ratio=0.2), 2, rows=100)
    assert (numbers.steps, numbers.ebft_steps, numbers.warmup_steps) == (20, 15, 3)
    by_epochs = derive(AsyncEBFTConfig(warm_start_steps=5), 2, rows=100)
    assert by_epochs.steps == 5 + 25


def test_steps_on_references_alone_take_new_ones_each() -> None:
    numbers = derive(AsyncEBFTConfig(ebft_rl_coef=0.0, ebft_ce_coef=1.0, num_iterations=4), 2, rows=100)
    assert (numbers.num_iterations, numbers.steps) == (1, 25)


def test_memory_of_a_micro_batch_goes_by_its_token_budget() -> None:
    def activations(**fields: Any) -> int:
        config = AsyncEBFTConfig(per_device_train_batch_size=4, max_seq_length=1024, num_generations=4, **fields)
        items = {item.label: item.bytes for item in estimate_memory(config, FACTS, derive(config, 1))}
        return items["activations of one micro-batch"]

    assert activations() == 4 * activations(train_token_budget=1024)
    assert activations(packing="padded") == activations()
    assert activations(packing="padded", train_token_budget=8192) == activations(), "four rows hold no more"
    assert activations(train_token_budget=8192) == 2 * activations()


def test_nested_text_configuration_counts() -> None:
    facts = facts_from_config({"architectures": ["X"], "vision_config": {"hidden_size": 9}, "text_config": LLAMA})
    assert (facts.num_layers, facts.hidden_size, facts.head_dim) == (4, 64, 16)
