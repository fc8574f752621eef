"""Keys that other systems know and we do not: what each is, why it is refused, and which values ask for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RefusedKey:
    """A key of another system."""

    text: str
    """What it is and why it is refused, or what to use instead."""
    harmless: tuple[Any, ...] = (None, False)
    """Values that ask for nothing: accepted with a note."""


_PARALLEL = RefusedKey("{} parallelism of the trainer. The engine is data parallel ZeRO-3; set it to 1.", (None, 0, 1))
_QUANTISED = RefusedKey("Quantised base weights. They cannot be partitioned or pushed exactly yet; use a LoRA on the full weights.")
_PRECISION = RefusedKey("A switch of the precision. Set dtype: float32, bfloat16 or float16.")
_STRIDED = RefusedKey("A field of strided EBFT (documents without a prompt/completion split). Only mode: async exists yet.", (None,))
_VLLM = RefusedKey(
    "Whether and how vLLM is used. Here vllm_launch: true starts servers with the run, vllm_server_base_url names running ones, "
    "vllm_colocate: true shares one GPU."
)
_VLLM_ADDRESS = RefusedKey("Where the vLLM server is. Use vllm_server_base_url: http://HOST:PORT, one or several.", (None,))
_ADAMW = RefusedKey(
    "Choice of the optimizer. It is AdamW; see learning_rate, weight_decay, adam_*.", (None, "adamw", "adamw_torch", "AdamW")
)
_TENSORBOARD = RefusedKey("A logging service. TensorBoard and metrics.jsonl in output_dir are what there is.")


def _parallel(kind: str) -> RefusedKey:
    return RefusedKey(_PARALLEL.text.format(kind), _PARALLEL.harmless)


REFUSED_KEYS: dict[str, RefusedKey] = {
    "tensor_parallel_size": _parallel("Tensor"),
    "tensor_model_parallel_size": _parallel("Tensor"),
    "autotp_size": _parallel("Tensor"),
    "sequence_parallel_size": _parallel("Sequence"),
    "ulysses_sequence_parallel_size": _parallel("Sequence"),
    "ring_attn_size": _parallel("Sequence"),
    "context_parallel_size": _parallel("Context"),
    "context_parallel_degree": _parallel("Context"),
    "sequence_parallel_degree": _parallel("Sequence"),
    "pipeline_parallel_size": _parallel("Pipeline"),
    "pipeline_model_parallel_size": _parallel("Pipeline"),
    "expert_parallel_size": _parallel("Expert"),
    "expert_model_parallel_size": _parallel("Expert"),
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "quantization": _QUANTISED,
    "bnb_4bit_quant_type": _QUANTISED,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "tf32": RefusedKey("TF32 matrix products. float32 stays float32 here."),
    "stride": _STRIDED,
    "context_length": _STRIDED,
    "generate_max_len": _STRIDED,
    "min_completion_prefix": _STRIDED,
    "ebft_stride": _STRIDED,
    "ebft_context_length": _STRIDED,
    "ebft_generate_max_len": _STRIDED,
    "ebft_min_completion_prefix": _STRIDED,
    "ebft_mode": RefusedKey("Axolotl's structured or strided mode. Structured is what mode: async does.", (None, "structured")),
    "use_vllm": _VLLM,
    "vllm_mode": _VLLM,
    "vllm_server_host": _VLLM_ADDRESS,
    "vllm_server_port": _VLLM_ADDRESS,
    "vllm_group_port": RefusedKey("Port of the weight transfer. A free one is chosen at every push.", (None,)),
    "vllm_enable_sleep_mode": RefusedKey("Sleeping between the steps comes with vllm_colocate: true."),
    "optimizer": _ADAMW,
    "steps_per_generation": RefusedKey("Reuse of a generation batch. Use num_iterations.", (None, 1)),
    "epsilon_high_ratio": RefusedKey("Use epsilon_high."),
    "num_train_samples": RefusedKey("Use max_train_rows and num_train_epochs."),
    "evaluation_strategy": RefusedKey("Use eval_steps.", (None, "no", False)),
    "eval_strategy": RefusedKey("Use eval_steps.", (None, "no", False)),
    "save_strategy": RefusedKey("Use save_steps.", (None, "no", False)),
    "logging_dir": RefusedKey("TensorBoard files are in output_dir/tb."),
    "push_to_hub": RefusedKey("Uploading. final/ in output_dir is in Hugging Face format."),
    "hub_model_id": RefusedKey("Uploading. final/ in output_dir is in Hugging Face format."),
    "wandb_project": _TENSORBOARD,
    "use_wandb": _TENSORBOARD,
    "fsdp": RefusedKey("FSDP. The engine is DeepSpeed ZeRO-3.", (None, False, "", [])),
    "fsdp_config": RefusedKey("FSDP. The engine is DeepSpeed ZeRO-3.", (None, {})),
    "neftune_noise_alpha": RefusedKey("Noise on embeddings; it would bias the policy's log-probs."),
    "repetition_penalty": RefusedKey("A penalty makes the sampled distribution another one than the policy's log-probs.", (None, 1.0)),
    "trl": RefusedKey("A section of Axolotl configurations. `ebft-ds convert-config FILE` translates them.", (None, {})),
    "ebft": RefusedKey("A section of Axolotl configurations. `ebft-ds convert-config FILE` translates them.", (None, {})),
    "datasets": RefusedKey("Axolotl's list of datasets. Use train_dataset, or `ebft-ds convert-config FILE`.", (None, [])),
    "rl": RefusedKey("Axolotl's kind of training. Use `ebft-ds convert-config FILE`.", (None,)),
}
"""Key -> why it is refused. Axolotl's own fields are in `axolotl_fields.py`."""
