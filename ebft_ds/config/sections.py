"""The typed sections of a recipe. Field names are unique over all sections, so that every one works as a flat name too.

Names follow TRL's and Axolotl's asynchronous EBFT configuration; the method's own carry `ebft_`. This module holds types and
single-field constraints; what concerns several fields is in `checks.py`, derived numbers are in `derived.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Section(BaseModel):
    """Unknown keys are errors; values are validated on assignment; defaults too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, protected_namespaces=())


class ModelSection(Section):
    """Which model is trained and how it is held in memory."""

    model_name_or_path: str | None = Field(None, description="Model folder or hub name.")
    model_revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    feature_model_name_or_path: str | None = Field(
        None, description="Checkpoint of the frozen feature network, if not the actor's own; needs the identical tokenizer."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Precision of weights and activations.")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="Attention kernel.")
    trust_remote_code: bool = Field(False, description="Run model code from the checkpoint.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward.")
    gradient_checkpointing_kwargs: dict[str, Any] = Field(default_factory=lambda: {"use_reentrant": False})
    use_liger_kernel: bool = Field(False, description="Liger's fused norm, MLP and rotary kernels (GPU; package liger-kernel).")
    disable_dropout: bool = Field(True, description="Set every dropout of the base model to 0 (LoRA dropout is `lora_dropout`).")


class PeftSection(Section):
    """Adapters. Without `use_peft` the whole model is trained."""

    use_peft: bool = Field(False, description="Train an adapter instead of the whole model.")
    lora_r: PositiveInt = 16
    lora_alpha: PositiveFloat = 32.0
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    lora_target_modules: str | list[str] = Field("all-linear", description="Module names, or `all-linear`.")
    lora_modules_to_save: list[str] = Field(default_factory=list, description="Modules trained in full beside the adapter.")
    use_rslora: bool = False
    use_dora: bool = False


class DataSection(Section):
    """Prompts and references."""

    train_dataset: str | None = Field(None, description="JSONL or Parquet file, dataset folder, or hub name.")
    eval_dataset: str | None = Field(None, description="Held-out rows; without it `eval_holdout` rows are split off.")
    dataset_config: str | None = Field(None, description="Configuration name of a hub dataset.")
    train_split: str = "train"
    eval_split: str | None = Field(
        None, description="Split of `eval_dataset`; default its only one, or the first of validation, valid, val, dev, test, eval."
    )
    eval_holdout: NonNegativeInt = Field(0, description="Rows split off the training data for evaluation (seeded).")
    eval_max_prompts: PositiveInt = Field(32, description="Most held-out prompts rolled out in one evaluation.")
    max_train_rows: PositiveInt | None = Field(None, description="Use only the first rows of the training data.")
    prompt_field: str = "prompt"
    ground_truth_field: str = "ground_truth"
    system_prompt: str | None = Field(None, description="Put before chat prompts that bring no system message.")
    chat_template: str | None = Field(None, description="Jinja text or file that replaces the tokenizer's template.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reference_end: Literal["auto", "none"] = Field("auto", description="`auto`: close references with end-of-turn or EOS.")
    max_seq_length: PositiveInt = Field(2048, description="Prompt plus completion, in tokens.")
    max_prompt_length: PositiveInt | None = Field(None, description="Longest prompt; default max_seq_length - max_completion_length.")
    max_reference_length: PositiveInt | None = Field(None, description="Longest reference; default max_seq_length - prompt.")
    overlong_prompts: Literal["drop", "error"] = Field("drop", description="Rows over the two limits above; never cut.")
    bad_rows: Literal["error", "skip"] = "error"
    shuffle: bool = True
    dataset_num_proc: PositiveInt | None = None


class MethodSection(Section):
    """EBFT itself: features, reward, objective (METHOD sections 1 and 2)."""

    ebft_feature_layers: list[float | int] = Field(
        default_factory=lambda: [0.25, 0.5, 0.75], description="Depth fractions in (0, 1], or whole layer numbers."
    )
    ebft_embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = "completion_mean"
    ebft_feature_eos: Literal["auto", "include", "exclude"] = Field(
        "auto", description="Does a terminal EOS count as a feature position? auto: exclude for last_token, else include."
    )
    ebft_feature_norm: Literal["pooled", "token", "per_layer"] = "pooled"
    ebft_use_whitening: bool | Literal["feature", "sample"] = Field(True, description="true = `feature`.")
    ebft_whitening_rtol: PositiveFloat | None = Field(None, description="Singular-value cutoff; default 1e-5, bf16 features 1e-2.")
    ebft_alignment_coef: float = 1.0
    ebft_diversity_coef: NonNegativeFloat = 1.0
    ebft_ce_coef: NonNegativeFloat = Field(0.0, description="Weight of cross-entropy on the reference completions.")
    ebft_rl_coef: NonNegativeFloat = Field(1.0, description="Weight of the EBFT policy loss; 0: references only, no rollouts.")
    ebft_adaptive_max_tokens: bool = Field(True, description="Each prompt's own token budget from its reference's length.")
    ebft_gt_length_multiplier: PositiveFloat = 1.5
    ebft_adaptive_min_tokens: PositiveInt = Field(64, description="Floor of the adaptive budget (never above max_completion_length).")
    diversity_importance: Literal["none", "sequence"] = "none"
    scoring_token_budget: PositiveInt = Field(16384, description="Most tokens in one feature forward on one rank, padding included.")
    cache_reference_features: bool = Field(True, description="Keep the references' features: the feature network never changes.")
    reference_cache_mb: PositiveFloat = Field(256.0, description="Most memory of that cache on each rank, in MiB; the oldest go first.")


class RolloutSection(Section):
    """Sampling and the rollout process."""

    num_generations: PositiveInt = Field(4, description="Completions per prompt.")
    max_completion_length: PositiveInt = 256
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: NonNegativeInt = 0
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    stop_token_ids: list[int] | None = Field(None, description="Default: the generation configuration's EOS ids.")
    generation_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further sampling fields by name (top_k, min_p, ...).")
    max_staleness: NonNegativeInt = Field(1, description="Oldest allowed age of a trained token, in optimizer steps; 0: synchronous.")
    rollout_engine: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="Engine behind the rollout loop; auto: vllm if `vllm_launch`, `vllm_colocate` or `vllm_server_base_url` is set."
    )
    rollout_loop: str | None = Field(None, description="`package.module:Class` that replaces EBFTRolloutLoop.")
    rollout_loop_kwargs: dict[str, Any] = Field(default_factory=dict)
    rollout_device: str | None = Field(None, description="Device of the embedded engine; required when an accelerator is present.")
    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="Default: `dtype`.")
    rollout_batch_size: PositiveInt = Field(64, description="Most sequences the embedded engine decodes at once.")
    rollout_threads: PositiveInt | None = Field(None, description="Threads of the rollout process on CPU; default 1.")
    rollout_start_timeout: PositiveFloat = Field(300.0, description="Seconds until the engine must be ready.")
    rollout_timeout: PositiveFloat = Field(600.0, description="Seconds without a sign of progress until the engine counts as lost.")
    vllm_merge_check_interval: PositiveInt = Field(1, description="Optimizer steps between merge checks (weight pushes).")
    sync_bucket_mb: PositiveFloat = Field(64.0, description="Size of one weight bucket in MiB.")
    sync_timeout: PositiveFloat = Field(300.0, description="Seconds until a weight push must be confirmed.")
    sync_mode: Literal["merged", "adapter"] = Field("merged", description="Push merged weights, or (vLLM, LoRA) the adapter alone.")
    sync_transport: Literal["auto", "nccl", "gloo", "disk", "ipc"] = Field(
        "auto", description="How merged weights reach vLLM; auto: nccl between GPUs, ipc when colocated, else gloo."
    )
    sync_dir: str | None = Field(None, description="Folder that servers read pushes from (disk, adapter); default in /dev/shm, local only.")
    sync_host: str | None = Field(None, description="Address of rank 0 as the servers see it (gloo, nccl); default found by routing.")
    sync_retries: NonNegativeInt = Field(2, description="Further attempts at a push that failed, before the run ends with code 5.")
    sync_probe: bool = Field(True, description="Compare engine and trainer log-probs on a fixed sequence at start and after each push.")
    sync_probe_tolerance: PositiveFloat | None = Field(None, description="Largest mean log-prob gap; default 1e-3 float32, 0.15 else.")


class VllmSection(Section):
    """The vLLM sidecar. In this section, and dotted (`vllm.launch=true`), the prefix `vllm_` may be left out."""

    vllm_launch: bool = Field(False, description="Start the servers with the run, on rank 0's node, and stop them with it.")
    vllm_server_base_url: str | list[str] | None = Field(None, description="Use running servers: one URL or several.")
    vllm_colocate: bool = Field(False, description="One GPU for trainer and server: it sleeps while the trainer computes (GPU only).")
    vllm_num_servers: PositiveInt = Field(1, description="Servers to start; the devices are divided among them.")
    vllm_devices: list[int] | None = Field(None, description="GPUs of the servers, taken out of the training ranks' set.")
    vllm_tensor_parallel_size: PositiveInt = 1
    vllm_pipeline_parallel_size: PositiveInt = 1
    vllm_data_parallel_size: PositiveInt = 1
    vllm_gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0)
    vllm_kv_cache_memory_bytes: PositiveInt | None = Field(None, description="Fixed cache size; default 256 MiB on CPU, else by memory.")
    vllm_max_model_len: PositiveInt | None = Field(None, description="Default: max_seq_length.")
    vllm_max_num_seqs: PositiveInt | None = Field(None, description="Sequences decoded at once by one server.")
    vllm_enforce_eager: bool | None = Field(None, description="No CUDA graphs, no compilation; default true on CPU.")
    vllm_enable_prefix_caching: bool = True
    vllm_host: str = Field("127.0.0.1", description="Address that started servers bind to; any other than loopback makes a key necessary.")
    vllm_port: int | None = Field(None, ge=1, le=65535, description="First server's port, the next ones follow; default free ones.")
    vllm_advertise_host: str | None = Field(None, description="Name under which other nodes reach servers bound to 0.0.0.0.")
    vllm_api_key_file: str | None = Field(None, description="File with the servers' key; else EBFT_VLLM_API_KEY, else a new key per run.")
    vllm_server_args: list[str] = Field(default_factory=list, description="Further arguments of the server command.")
    vllm_server_env: dict[str, str] = Field(default_factory=dict, description="Further environment variables of the server.")
    vllm_server_start_timeout: PositiveFloat = Field(600.0, description="Seconds until a started server must be healthy.")
    vllm_server_restarts: NonNegativeInt = Field(2, description="Times that a dead server is started again in one run.")
    vllm_stop_grace: PositiveFloat = Field(10.0, description="Seconds between the steps of stopping a server.")
    vllm_request_timeout: PositiveFloat = Field(600.0, description="Seconds until a generation request counts as lost and is sent again.")
    vllm_reconnect_timeout: PositiveFloat = Field(25.0, description="Attached servers: seconds without any answer until the run ends.")
    vllm_request_retries: NonNegativeInt = Field(5, description="Further attempts at a generation request that got no answer.")
    vllm_max_concurrency: PositiveInt | None = Field(None, description="Most requests in flight at one server; default: adaptive.")
    vllm_lora_alias: str = Field("ebft-policy", description="Adapter name for `sync_mode: adapter`; the version is appended.")


class LossSection(Section):
    """Advantages and policy loss (METHOD sections 3 and 4)."""

    advantage_estimator: Literal["ebft_rloo", "rloo", "group", "reinforce"] = "ebft_rloo"
    scale_rewards: Literal["none", "group", "batch"] = "none"
    loss_type: Literal["reinforce", "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"] = "dapo"
    epsilon_low: NonNegativeFloat = 0.2
    epsilon_high: NonNegativeFloat = 0.2
    old_logprobs: Literal["current", "engine", "recompute"] = "current"
    num_iterations: PositiveInt = Field(
        1, description="Optimizer steps on each batch of rollouts; above 1 needs old log-probs of its start."
    )
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"] = "token_truncate"
    vllm_importance_sampling_cap: PositiveFloat = 3.0
    beta: NonNegativeFloat = Field(0.0, description="KL to the reference policy (the frozen base).")
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    mask_truncated_completions: bool = False
    skip_zero_advantage_batches: bool = True
    reward_funcs: list[str] = Field(default_factory=list, description="`package.module:function` further objectives.")
    reward_num_workers: PositiveInt = Field(1, description="Processes that call the reward functions.")
    reward_timeout: PositiveFloat = Field(60.0, description="Seconds until a call of a reward function counts as hung.")
    reward_models: list[str] = Field(default_factory=list, description="Reward models (folders or hub names) as further objectives.")
    reward_model_token_budget: PositiveInt | None = Field(
        None, description="Most tokens in one forward of a reward model on one rank; default scoring_token_budget."
    )
    reward_weights: list[float] | None = Field(
        None, description="Feature matching first, then one per reward model, then one per reward function."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    warm_start_steps: NonNegativeInt = Field(0, description="Cross-entropy steps on references before the first rollouts.")
    warm_start_learning_rate: PositiveFloat | None = Field(None, description="Default: learning_rate.")
    warm_start_batch_size: PositiveInt | None = Field(None, description="References per warm-start step; default the global batch.")
    rl_warmup_start: NonNegativeFloat = Field(1.0, description="Factor of ebft_rl_coef at the first EBFT step...")
    rl_warmup_steps: NonNegativeInt = Field(0, description="...rising linearly to 1 over these steps.")
    ce_decay_steps: NonNegativeInt = Field(0, description="Steps over which ebft_ce_coef falls linearly to 0 (0: constant).")
    logprob_chunk_size: PositiveInt = Field(256, description="Positions per chunk of the log-prob head.")
    log_entropy: bool = Field(True, description="Log the policy's mean entropy on completion tokens.")


class RewardSection(Section):
    """Reward models (`mode: reward`): preference rows, loss, evaluation."""

    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    responses_field: str = Field("responses", description="Column of K >= 2 responses, best first, instead of chosen and rejected.")
    tools_field: str = Field("tools", description="Column of tools that the chat template is given.")
    margin_field: str = Field("margin", description="Column of by how much chosen is better; missing: 0.")
    preference_field: str = Field("preference", description="Column of the probability that chosen is better (0.5: a tie); missing: 1.")
    subset_field: str = Field("subset", description="Column that evaluation reports by.")
    truncation_mode: Literal["keep_end", "keep_start", "drop"] = Field(
        "keep_end", description="Over-long rows: keep the last tokens, the first ones, or leave the row out. Counted in the log."
    )
    identical_pairs: Literal["drop", "keep"] = Field("drop", description="Rows whose responses encode to the same tokens.")
    empty_responses: Literal["keep", "drop"] = Field("keep", description="Rows with an empty response (scored at its end token).")
    streaming: bool = Field(False, description="Read the rows one after the other and never all of them; needs max_steps.")
    shuffle_buffer_size: PositiveInt = Field(1000, description="Rows among which a stream draws the next one.")
    remove_unused_columns: bool = Field(
        True, description="false: RewardTrainer.data_collator passes columns that no field names on, as lists."
    )
    pad_to_multiple_of: PositiveInt | None = Field(
        None, description="Width of what RewardTrainer.data_collator and its collect functions pad. Training itself pads nothing."
    )
    reward_loss_type: Literal["bradley_terry", "hinge", "plackett_luce"] = Field(
        "bradley_terry", description="Over all pairs of a row, or (plackett_luce) over its whole ranking."
    )
    center_rewards_coefficient: NonNegativeFloat | None = Field(None, description="Weight of the squared sum of a pair's rewards.")
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5, description="Probability that a label is taken to be wrong.")
    hinge_margin: PositiveFloat = Field(1.0, description="Gap from which on `hinge` is content; a row's margin is added.")
    torch_compile: bool = Field(False, description="Compile each block of the network: torch.compile, for training and evaluation.")
    per_device_eval_batch_size: PositiveInt | None = Field(None, description="Rows per rank in one evaluation forward; default training's.")
    eval_max_rows: PositiveInt | None = Field(None, description="Use only the first rows of each evaluation set.")
    subset_sections: dict[str, list[str]] = Field(
        default_factory=dict, description="Section -> subsets whose mean is reported; default RewardBench's where its subsets occur."
    )
    normalize_rewards: bool = Field(False, description="Evaluate, score and serve (reward - mean) / std of the held-out rows.")


class OptimSection(Section):
    """Optimizer and schedule."""

    learning_rate: PositiveFloat = Field(1e-6, description="Default in mode reward: 1e-5.")
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = Field(1.0, description="0: no clipping.")
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
    ] = "constant_with_warmup"
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    warmup_steps: NonNegativeInt = 0
    warmup_ratio: float = Field(0.0, ge=0.0, lt=1.0)
    cosine_min_lr_ratio: float | None = Field(None, ge=0.0, le=1.0)
    loraplus_lr_ratio: PositiveFloat | None = Field(None, description="LoRA+: learning rate of B over that of A.")
    loraplus_lr_embedding: PositiveFloat = 1e-6
    embedding_lr: PositiveFloat | None = None
    embedding_lr_scale: PositiveFloat | None = None
    lr_groups: list[dict[str, Any]] = Field(
        default_factory=list, description="[{name, modules: [name or regex], lr, weight_decay?}], the first match wins."
    )


class RunSection(Section):
    """Length of the run, batch, row layout, reproducibility, output."""

    mode: Literal["async", "reward"] = Field("async", description="Kind of training: EBFT, or a reward model from preferences.")
    output_dir: str | None = None
    overwrite_output_dir: bool = Field(False, description="Delete another run's files in output_dir.")
    resume_from_checkpoint: str | None = Field(None, description="`auto`, or a checkpoint folder.")
    per_device_train_batch_size: PositiveInt = Field(
        8,
        description="Completions (mode reward: rows) per rank in one micro-batch; packed ones are cut by `train_token_budget`.",
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="Micro-batches per rank in one optimizer step.")
    packing: Literal["auto", "shared", "unshared", "padded"] = Field(
        "auto",
        description="Row layout: a group's prompt once for all its branches, whole sequences in one row, or padded rows. auto: by model.",
    )
    packing_attention: Literal["auto", "split", "dense", "flex"] = Field(
        "auto", description="Attention of packed rows; auto: flex on a GPU, on a CPU dense for short rows and split for longer ones."
    )
    train_token_budget: PositiveInt | None = Field(
        None, description="Most tokens in one policy micro-batch on one rank; default per_device_train_batch_size x max_seq_length."
    )
    max_steps: int = Field(-1, ge=-1, description="Optimizer steps; -1: from num_train_epochs.")
    num_train_epochs: PositiveFloat = Field(1.0, description="Passes over the prompts, when max_steps is -1.")
    seed: int = 42
    num_processes: PositiveInt | None = Field(None, description="Ranks that `ebft-ds train` starts; default one per GPU, or 1.")
    master_port: int | None = Field(None, ge=1, le=65535, description="Rendezvous port; default a free one.")


class EngineSection(Section):
    """DeepSpeed."""

    deepspeed: str | dict[str, Any] | None = Field(
        None, description="JSON file merged under the recipe, or a mapping laid over the default ds_configs/zero3.json."
    )
    feature_deepspeed: str | dict[str, Any] | None = Field(
        None, description="Same for the frozen copy; default ds_configs/feature_zero3.json."
    )
    ddp_timeout: PositiveFloat = Field(1800.0, description="Seconds until a collective counts as hung.")
    deterministic: bool = Field(False, description="torch.use_deterministic_algorithms.")


class CheckpointSection(Section):
    """Saving."""

    save_steps: NonNegativeInt = Field(0, description="Steps between checkpoints; 0: only at the end.")
    save_total_limit: PositiveInt | None = Field(2, description="Newest checkpoints kept.")
    save_at_end: bool = True
    export_final: bool = Field(True, description="Write final/ in Hugging Face format.")
    export_merged: bool = Field(True, description="With PEFT: also write the merged model.")


class MonitorSection(Section):
    """What a user sees."""

    logging_steps: PositiveInt = 1
    log_samples_steps: NonNegativeInt = Field(10, description="Steps between tables of sample completions; 0: never.")
    log_samples: PositiveInt = Field(3, description="Completions per table.")
    eval_steps: NonNegativeInt = Field(0, description="Steps between evaluations; before and after the run always.")
    eval_num_generations: PositiveInt = 4
    eval_at_start: bool = True
    eval_at_end: bool = True
    report_to: list[Literal["tensorboard"]] = Field(default=["tensorboard"])
    log_level: Literal["debug", "info", "warning", "error"] = "info"


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "peft": PeftSection,
    "data": DataSection,
    "method": MethodSection,
    "rollout": RolloutSection,
    "vllm": VllmSection,
    "loss": LossSection,
    "reward": RewardSection,
    "optim": OptimSection,
    "run": RunSection,
    "engine": EngineSection,
    "checkpoint": CheckpointSection,
    "monitor": MonitorSection,
}
"""Section name in a recipe -> its type."""
