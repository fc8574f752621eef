"""Other spellings of recipe fields. They are accepted, and every use is reported with the canonical name."""

from __future__ import annotations

from ebft_ds.config.fields import FIELDS

PREFIX = "ebft_"

_COMMON_NAMES = {
    # model
    "base_model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "model_path": "model_name_or_path",
    "revision": "model_revision",
    "torch_dtype": "dtype",
    "model_dtype": "dtype",
    "feature_model": "feature_model_name_or_path",
    "attention_implementation": "attn_implementation",
    # adapters
    "use_lora": "use_peft",
    "lora": "use_peft",
    "lora_rank": "lora_r",
    "peft_r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    # data
    "dataset": "train_dataset",
    "dataset_name": "train_dataset",
    "dataset_path": "train_dataset",
    "train_file": "train_dataset",
    "validation_dataset": "eval_dataset",
    "validation_file": "eval_dataset",
    "dataset_split": "train_split",
    "max_length": "max_seq_length",
    "max_sequence_length": "max_seq_length",
    "max_model_len": "max_seq_length",
    "sequence_len": "max_seq_length",
    "prompt_column": "prompt_field",
    "input_key": "prompt_field",
    "reference_field": "ground_truth_field",
    "ground_truth_column": "ground_truth_field",
    "label_key": "ground_truth_field",
    # rollouts
    "n_samples_per_prompt": "num_generations",
    "group_size": "num_generations",
    "num_samples": "num_generations",
    "samples_per_prompt": "num_generations",
    "max_new_tokens": "max_completion_length",
    "max_response_length": "max_completion_length",
    "max_off_policy_steps": "max_staleness",
    "off_policy_steps": "max_staleness",
    "max_lag": "max_staleness",
    "vllm_sync_interval": "vllm_merge_check_interval",
    "weight_sync_steps": "vllm_merge_check_interval",
    "sync_interval": "vllm_merge_check_interval",
    "merge_check_interval": "vllm_merge_check_interval",
    # vLLM
    "vllm_url": "vllm_server_base_url",
    "vllm_base_url": "vllm_server_base_url",
    "vllm_server_url": "vllm_server_base_url",
    "vllm_num_engines": "vllm_num_servers",
    "vllm_max_model_length": "vllm_max_model_len",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "enforce_eager": "vllm_enforce_eager",
    "enable_prefix_caching": "vllm_enable_prefix_caching",
    "max_num_seqs": "vllm_max_num_seqs",
    # loss
    "kl_coef": "beta",
    "kl_beta": "beta",
    "init_kl_coef": "beta",
    "epsilon": "epsilon_low",
    "clip_low": "epsilon_low",
    "clip_high": "epsilon_high",
    "importance_sampling_mode": "vllm_importance_sampling_mode",
    "importance_sampling_cap": "vllm_importance_sampling_cap",
    "warm_start": "warm_start_steps",
    "sft_warmup_steps": "warm_start_steps",
    "warm_start_lr": "warm_start_learning_rate",
    "reward_functions": "reward_funcs",
    # reward models
    "center_rewards": "center_rewards_coefficient",
    "loss_margin_field": "margin_field",
    "chosen_key": "chosen_field",
    "rejected_key": "rejected_field",
    "chosen_column": "chosen_field",
    "rejected_column": "rejected_field",
    "eval_batch_size": "per_device_eval_batch_size",
    # optimizer
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "adam_eps": "adam_epsilon",
    "gradient_clipping": "max_grad_norm",
    # run
    "micro_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "num_train_steps": "max_steps",
    "random_seed": "seed",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
    "main_process_port": "master_port",
    "overwrite": "overwrite_output_dir",
    "resume": "resume_from_checkpoint",
    # engine, saving, output
    "deepspeed_config": "deepspeed",
    "ds_config": "deepspeed",
    "ddp_timeout_seconds": "ddp_timeout",
    "save_interval": "save_steps",
    "keep_last": "save_total_limit",
    "log_interval": "logging_steps",
    "eval_interval": "eval_steps",
    "num_generations_eval": "eval_num_generations",
}


def _prefix_spellings() -> dict[str, str]:
    """The method's fields without `ebft_`, and the neighbouring general fields with it."""
    bare = {name.removeprefix(PREFIX): name for name in FIELDS if name.startswith(PREFIX)}
    dressed = {
        PREFIX + name: name
        for name, spec in FIELDS.items()
        if spec.section in ("method", "rollout", "loss") and not name.startswith((PREFIX, "vllm_"))
    }
    return bare | dressed


ALIASES: dict[str, str] = {alias: name for alias, name in (_prefix_spellings() | _COMMON_NAMES).items() if alias not in FIELDS}
"""Alias -> canonical field name."""


def aliases_of(field: str) -> list[str]:
    """All other spellings of a field, sorted."""
    return sorted(alias for alias, name in ALIASES.items() if name == field)
