"""Every field of Axolotl's asynchronous EBFT configuration, one row each: what becomes of it here.

The recipe loader judges foreign keys by this table, `convert-config` translates by it, and docs/axolotl-fields.md is generated
from it. A field is `supported` under `ours`, `different` (accepted, with the difference in `text`; `ours` None: it needs no field
here), or `refused` with the reason, unless it is set to its do-nothing default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["supported", "different", "refused"]


@dataclass(frozen=True)
class AxolotlField:
    """One row."""

    name: str
    default: Any
    """Axolotl's default (a name in capitals where its documentation shows only the constant's name)."""
    status: Status
    ours: str | None
    text: str
    """What the field is and how it differs here, or why it is refused."""


def _same(name: str, default: Any, text: str = "Same meaning.", ours: str | None = None) -> AxolotlField:
    return AxolotlField(name, default, "supported", ours or name, text)


def _different(name: str, default: Any, text: str, ours: str | None = None) -> AxolotlField:
    return AxolotlField(name, default, "different", ours, text)


def _no(name: str, default: Any, text: str) -> AxolotlField:
    return AxolotlField(name, default, "refused", None, text)


_ROWS = (
    _no("model_type", None, "Name of the model class. It is read from the checkpoint's config.json."),
    _no("lr_quadratic_warmup", False, "Quadratic warm-up. Warm-up is linear; see lr_scheduler_type."),
    _no("pretraining", False, "Streaming pre-training. EBFT needs prompts with references."),
    _no("sample_packing", False, "Packs several documents into a row. Rows are padded per micro-batch here."),
    _no("batch_flattening", False, "Padding-free rows through flash attention. Rows are padded per micro-batch here."),
    _no("balance_labels", False, "Balances label counts over batches of supervised data. EBFT's batches are groups of completions."),
    _no("label_balance_window_optim_steps", 1, "Window of balance_labels, which does not exist here."),
    _no("label_keep_prob", None, "Drops labels at random. References are kept whole."),
    _no("label_keep_prob_normalize", "dropped", "Normalisation of label_keep_prob, which does not exist here."),
    _no("sample_packing_sequentially", False, "Order of sample_packing, which does not exist here."),
    _no("sample_packing_mp_start_method", None, "Process start of sample_packing, which does not exist here."),
    _no("sample_packing_drop_attention_mask", False, "Mask of sample_packing, which does not exist here."),
    _no("multipack_real_batches", False, "Batch form of sample_packing, which does not exist here."),
    _no(
        "checkpoint_save_retry_wait",
        None,
        "Wait before a failed save is tried again. A failed save ends the run; the previous checkpoint stays.",
    ),
    _no("checkpoint_save_retries", 1, "Tries of a save. A failed save ends the run here; the previous checkpoint stays."),
    _different("include_tkps", True, "Tokens per second are always logged (`perf/tokens_per_s`)."),
    _no("eval_sample_packing", None, "sample_packing in evaluation, which does not exist here."),
    _no("sample_packing_efficiency", 1.0, "Tuning of sample_packing, which does not exist here."),
    _no("sample_packing_bin_size", 200, "Tuning of sample_packing, which does not exist here."),
    _no("sample_packing_group_size", 100000, "Tuning of sample_packing, which does not exist here."),
    _different(
        "max_seq_length", 2048, "Prompt plus completion. Longer prompts are dropped and counted, or an error; never cut.", "max_seq_length"
    ),
    _same("dataset_num_proc", None, "Processes that prepare the data."),
    _no("relora_prune_ratio", None, "ReLoRA restarts. They merge into the base weights, which stay frozen here."),
    _no("relora_prune_method", None, "ReLoRA restarts. They merge into the base weights, which stay frozen here."),
    _no("jagged_restart_steps", None, "Schedule with restarts; see lr_scheduler_type for what there is."),
    _no("jagged_restart_warmup_steps", None, "Schedule with restarts; see lr_scheduler_type for what there is."),
    _no("jagged_restart_anneal_steps", None, "Schedule with restarts; see lr_scheduler_type for what there is."),
    _no("bench_split", "eval", "Multiple-choice benchmark during training. Evaluation here is on held-out prompts."),
    _no("bench_dataset", "pharaouk/dharma-1/dharma_1_mini.json", "Multiple-choice benchmark. Evaluation here is on held-out prompts."),
    _no("do_bench_eval", False, "Multiple-choice benchmark during training. Evaluation here is on held-out prompts."),
    _no("do_causal_lm_eval", False, "Generation metrics of supervised training. Held-out cross-entropy and chrF are always measured here."),
    _no("max_bench_samples", None, "Size of the multiple-choice benchmark, which does not exist here."),
    _no("bench_source_max_len", 2048, "Length of the multiple-choice benchmark, which does not exist here."),
    _no("dataloader_prefetch_factor", None, "Prefetch of a torch DataLoader. The rollout process reads the prompts ahead by itself."),
    _same("cosine_min_lr_ratio", None, "Floor of the cosine schedule as a share of the learning rate."),
    _no("cosine_constant_lr_ratio", None, "Constant tail of the cosine schedule. Use cosine_min_lr_ratio."),
    _same("loraplus_lr_ratio", None, "LoRA+: learning rate of B over that of A."),
    _same("loraplus_lr_embedding", 1e-06, "LoRA+: learning rate of embedding adapters."),
    _same("embedding_lr_scale", None, "Learning rate of the embeddings as a factor."),
    _same("lr_groups", None, "Named parameter groups: [{name, modules, lr, weight_decay}]; null is the empty list."),
    _same("embedding_lr", None, "Learning rate of the embeddings."),
    _no("qlora", False, "4-bit base weights. Quantised bases cannot be partitioned or pushed exactly yet."),
    _no("orpo_alpha", None, "ORPO, a preference loss on supervised data."),
    _no("lisa_n_layers", None, "LISA trains random layers; ZeRO-3's optimizer partitions are fixed at the start."),
    _no("lisa_step_interval", None, "LISA trains random layers; ZeRO-3's optimizer partitions are fixed at the start."),
    _no("lisa_layers_attribute", None, "LISA trains random layers; ZeRO-3's optimizer partitions are fixed at the start."),
    _no("curriculum_sampling", None, "Keeps the file's order. Use shuffle: false."),
    _no("alternate_lr_scheduler_type", None, "Further schedules (one-cycle, REX); see lr_scheduler_type for what there is."),
    _different("chat_template", None, "Jinja text or a file here, not the name of a built-in template.", "chat_template"),
    _no("adam_beta3", None, "Third beta of the CAME optimizer. The optimizer here is AdamW."),
    _no("adam_epsilon2", None, "Second epsilon of the CAME optimizer. The optimizer here is AdamW."),
    _no("activation_offloading", None, "Moves activations to the host. Use gradient_checkpointing, or offload in the DeepSpeed JSON."),
    _no("layer_offloading", None, "Moves frozen layers to the host. Use offload_param in the DeepSpeed JSON."),
    _no("image_size", None, "Images. Only text models are trained."),
    _no("image_resize_algorithm", None, "Images. Only text models are trained."),
    _no("dion_learning_rate", None, "Dion optimizer. The optimizer here is AdamW."),
    _no("dion_momentum", None, "Dion optimizer. The optimizer here is AdamW."),
    _no("dion_rank_fraction", None, "Dion optimizer. The optimizer here is AdamW."),
    _no("dion_rank_multiple_of", None, "Dion optimizer. The optimizer here is AdamW."),
    _different(
        "reward_weights",
        None,
        "Feature matching comes first, then one weight per entry of reward_models, then of reward_funcs.",
        "reward_weights",
    ),
    _same(
        "multi_objective_aggregation", "sum_then_normalize", "With advantage_estimator: group; ebft_rloo adds weighted advantages instead."
    ),
    _different(
        "scale_rewards",
        "group",
        "Default `none`: dividing by the group's deviation changes the objective. true is `group`, false is `none`.",
        "scale_rewards",
    ),
    _different(
        "mask_truncated_completions",
        False,
        "Masked completions leave the denominators too, so their share does not scale the loss.",
        "mask_truncated_completions",
    ),
    _same("skip_zero_advantage_batches", True, "No policy forward for micro-batches whose advantages are all 0; ranks stay in lockstep."),
    _different(
        "reward_num_workers",
        1,
        "Worker processes of reward functions. Feature scoring is a collective of the trainer's ranks.",
        "reward_num_workers",
    ),
    _different(
        "scoring_token_budget",
        None,
        "Most padded tokens of one feature forward on one rank; always bounded here (default 16384).",
        "scoring_token_budget",
    ),
    _same("loss_type", "dapo", "All denominators span ranks and accumulation steps here."),
    _different(
        "vllm_importance_sampling_mode",
        "token_truncate",
        "Mask modes give weight 0 outside the cap (there: 1 over the cap).",
        "vllm_importance_sampling_mode",
    ),
    _same("vllm_importance_sampling_cap", 3.0, "Cap of the trainer/engine mismatch weight."),
    _different("rollout_loop", None, "`package.module:Class` that speaks this package's rollout protocol.", "rollout_loop"),
    _same("rollout_loop_kwargs", None, "Passed to the class of rollout_loop; null is the empty mapping."),
    _same("vllm_merge_check_interval", "DEFAULT_MERGE_CHECK_INTERVAL", "Optimizer steps between weight pushes, to any engine; default 1."),
    _different(
        "vllm_lora_alias",
        None,
        "First part of the adapter's name with sync_mode: adapter (default merged); run and version follow it.",
        "vllm_lora_alias",
    ),
    _same("ebft_feature_layers", [0.25, 0.5, 0.75], "Depth fractions; whole numbers are layers."),
    _different(
        "ebft_embed_method",
        "last_token",
        "Default `completion_mean`: last_token is gamed easily. Positions come from lengths.",
        "ebft_embed_method",
    ),
    _different(
        "ebft_use_whitening",
        False,
        "Default true. true is `feature` whitening; `sample` is the kind of the authors' code.",
        "ebft_use_whitening",
    ),
    _same("ebft_alignment_coef", 1.0, "Weight of the alignment term."),
    _different(
        "ebft_diversity_coef", 1.0, "The baseline is exact for the diversity term too (advantage_estimator).", "ebft_diversity_coef"
    ),
    _different("ebft_ce_coef", 0.0, "Has its effect here: token-mean cross-entropy on references (there it is ignored).", "ebft_ce_coef"),
    _different("ebft_adaptive_max_tokens", True, "Each prompt has its own budget, not one for the batch.", "ebft_adaptive_max_tokens"),
    _same("ebft_gt_length_multiplier", 1.5, "Budget of a completion over its reference's length."),
    _different("generation_kwargs", None, "Sampling fields by name: temperature, top_p, top_k, min_p.", "generation_kwargs"),
)

AXOLOTL_FIELDS: dict[str, AxolotlField] = {row.name: row for row in _ROWS}
"""Axolotl's field name -> its row, in the order of Axolotl's page."""

AXOLOTL_ARGUMENTS: tuple[tuple[str, str, str], ...] = (
    ("AxolotlAsyncEBFTTrainer", "model", "AsyncEBFTTrainer(model, ...): a path or a model object."),
    ("AxolotlAsyncEBFTTrainer", "args", "AsyncEBFTTrainer(args=AsyncEBFTConfig(...))."),
    ("AxolotlAsyncEBFTTrainer", "train_dataset", "The same; eval_dataset exists beside it."),
    ("AxolotlAsyncEBFTTrainer", "processing_class", "The same: the tokenizer."),
    ("AxolotlAsyncEBFTTrainer", "callbacks", "The same, with this package's hooks."),
    ("AxolotlAsyncEBFTTrainer", "optimizers", "The same: (optimizer, schedule)."),
    ("AxolotlAsyncEBFTTrainer", "peft_config", "The same; the lora_* fields of a recipe do it without code."),
    ("AxolotlAsyncEBFTTrainer", "kwargs", "There are no further arguments but reward_funcs: an unknown one is an error."),
    ("EBFTScorer", "layer_indices", "The same."),
    ("EBFTScorer", "embed_method", "The same."),
    ("EBFTScorer", "use_whitening", "The same; also `feature` or `sample`."),
    ("EBFTScorer", "alignment_coef", "The same."),
    ("EBFTScorer", "diversity_coef", "The same."),
    ("EBFTScorer", "feature_network", "The same."),
)
"""(class, constructor argument, what it is here)."""
