"""Axolotl configurations turned into recipes: what was taken over, what was left out, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebft_ds.config.aliases import ALIASES
from ebft_ds.config.async_ebft import AsyncEBFTConfig
from ebft_ds.config.axolotl_fields import AXOLOTL_FIELDS
from ebft_ds.config.explain import differences
from ebft_ds.config.fields import FIELDS
from ebft_ds.config.foreign import judge_foreign, translate_value
from ebft_ds.config.other_systems import REFUSED_KEYS
from ebft_ds.config.yaml_text import read_yaml_settings
from ebft_ds.errors import ConfigError

_RENAMED = {
    "base_model": "model_name_or_path",
    "revision_of_model": "model_revision",
    "sequence_len": "max_seq_length",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "saves_total_limit": "save_total_limit",
    "dataset_processes": "dataset_num_proc",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "importance_sampling_level": "",
}
_NOT_TAKEN = {
    "tokenizer_type": "the tokenizer class comes from the checkpoint",
    "tokenizer_config": "the tokenizer is the model's",
    "base_model_config": "the configuration is the model's",
    "special_tokens": "the tokenizer's own are used",
    "dataset_prepared_path": "prepared data is not kept",
    "logging_steps_per_epoch": "use logging_steps",
    "group_by_length": "micro-batches are planned by length already",
    "pad_to_sequence_len": "rows are padded per micro-batch",
    "strict": "unknown keys are always errors",
    "val_set_size": "as a share it depends on the data; set eval_holdout to a number of rows",
    "remove_unused_columns": "only the named columns are read",
    "train_on_inputs": "prompts are never trained on",
    "plugins": "nothing is loaded by name but rollout_loop and reward_funcs",
    "async_prefetch": "the rollout process always works ahead, within max_staleness",
    "use_data_producer": "the rollout process always works ahead, within max_staleness",
    "wandb_entity": "TensorBoard is what there is",
    "wandb_name": "TensorBoard is what there is",
    "wandb_watch": "TensorBoard is what there is",
    "wandb_log_model": "TensorBoard is what there is",
    "wandb_run_id": "TensorBoard is what there is",
}
_KEPT_DEFAULTS = ("ebft_embed_method", "ebft_use_whitening", "scale_rewards")
"""Fields whose default here is another: stated in the recipe, so that it means what the Axolotl configuration meant."""


@dataclass
class Conversion:
    """A recipe's fields, and what a user should know about them."""

    fields: dict[str, Any] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def config(self) -> AsyncEBFTConfig:
        """The converted recipe, validated field by field."""
        return AsyncEBFTConfig(**self.fields)


def convert_axolotl(path: Path) -> Conversion:
    """Translate an Axolotl YAML file. Errors: ConfigError for an unreadable file, or for a kind of training that is not EBFT."""
    settings, _ = read_yaml_settings(path, str(path))
    raw = {setting.key: setting.value for setting in settings}
    kind = raw.pop("rl", None)
    if kind not in (None, "ebft"):
        raise ConfigError(f"{path}: rl: {kind} is another kind of training; only EBFT configurations are converted")
    result = Conversion()
    flat = dict(_flattened(raw))
    _vllm(result, flat)
    for name, value in flat.items():
        _convert_one(result, name, value, str(path))
    for difference in differences():
        if difference.field in _KEPT_DEFAULTS and difference.field not in result.fields:
            result.fields[difference.field] = difference.theirs
            result.notes.append(f"{difference.field}: {difference.theirs} is Axolotl's default, stated because it differs here")
    return result


def _flattened(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of the trl: and ebft: sections come out flat; those of vllm: get it as a prefix."""
    for key, value in raw.items():
        if key in ("trl", "ebft") and isinstance(value, dict):
            yield from value.items()
        elif key == "vllm" and isinstance(value, dict):
            yield from ((f"vllm.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _convert_one(result: Conversion, name: str, value: Any, origin: str) -> None:
    special = _SPECIAL.get(name)
    if special is not None:
        special(result, value)
        return
    if name.startswith("vllm."):
        _vllm_section(result, name.removeprefix("vllm."), value)
        return
    target = name if name in FIELDS else _RENAMED.get(name) or ALIASES.get(name)
    if target:
        _take(result, target, value)
    elif name in _NOT_TAKEN:
        result.dropped.append(f"{name}: {_NOT_TAKEN[name]}")
    elif name in AXOLOTL_FIELDS or name in REFUSED_KEYS:
        try:
            note = judge_foreign(name, value, origin)
            result.dropped.append(f"{name}: {note.partition(': ')[2] if note else 'not needed'}")
        except ConfigError:
            reason = AXOLOTL_FIELDS[name].text if name in AXOLOTL_FIELDS else REFUSED_KEYS[name].text
            result.dropped.append(f"{name}: {value!r} is NOT taken over: {reason}")
    else:
        result.dropped.append(f"{name}: not known here")


def _take(result: Conversion, target: str, value: Any) -> None:
    if value is None:
        return
    value = translate_value(target, value)
    if target in result.fields and result.fields[target] != value:
        result.notes.append(f"{target}: {value!r} replaces {result.fields[target]!r} given under another name")
    result.fields[target] = value


def _vllm(result: Conversion, flat: dict[str, Any]) -> None:
    """TRL's switch, mode and address of the server, taken out of `flat`."""
    wanted, mode = flat.pop("use_vllm", None), flat.pop("vllm_mode", None)
    host, port = flat.pop("vllm_server_host", None), flat.pop("vllm_server_port", None)
    if not wanted:
        return
    if mode == "colocate":
        result.fields["vllm_colocate"] = True
        return
    if "vllm_server_base_url" not in flat:
        reachable = host if host not in (None, "0.0.0.0") else "127.0.0.1"
        result.fields["vllm_server_base_url"] = f"http://{reachable}:{port or 8000}"
    result.notes.append("use_vllm: start the server with `ebft-ds serve`, or replace vllm_server_base_url by vllm_launch: true")


def _vllm_section(result: Conversion, name: str, value: Any) -> None:
    """A key of Axolotl's vllm: section, which describes the server."""
    renamed = {"dtype": "rollout_dtype", "max_model_len": "vllm_max_model_len"}.get(name, f"vllm_{name}")
    if renamed == "rollout_dtype" and value == "auto":
        return
    if renamed in FIELDS:
        _take(result, renamed, value)
    else:
        result.dropped.append(f"vllm.{name}: not known here; the server's own arguments go into vllm_server_args")


def _adapter(result: Conversion, value: Any) -> None:
    if value == "lora":
        result.fields["use_peft"] = True
    elif value == "qlora":
        result.fields["use_peft"] = True
        result.dropped.append("adapter: qlora becomes a LoRA on the full weights: quantised bases are refused")
    elif value:
        result.dropped.append(f"adapter: {value} is not supported")


def _target_linear(result: Conversion, value: Any) -> None:
    if value:
        result.fields["lora_target_modules"] = "all-linear"


def _datasets(target: str) -> Callable[[Conversion, Any], None]:
    def convert(result: Conversion, value: Any) -> None:
        entries = value if isinstance(value, list) else [value]
        if not entries or not isinstance(entries[0], dict) or "path" not in entries[0]:
            result.dropped.append(f"{target}: {value!r} names no path")
            return
        first = entries[0]
        files = first.get("data_files")
        result.fields[target] = files[0] if isinstance(files, list) and files else files or first["path"]
        if target == "train_dataset":
            _take(result, "dataset_config", first.get("name"))
            _take(result, "train_split", first.get("split"))
        else:
            _take(result, "eval_split", first.get("split"))
        if first.get("type") is not None:
            result.notes.append(f"{target}: type {first['type']!r} is left out; rows need prompt and ground_truth (prompt_field, ...)")
        if len(entries) > 1:
            result.dropped.append(f"{target}: only the first of {len(entries)} datasets is taken; join them into one file")

    return convert


def _precision(name: str) -> Callable[[Conversion, Any], None]:
    def convert(result: Conversion, value: Any) -> None:
        if value == "auto":
            result.notes.append("bf16: auto becomes dtype: bfloat16")
        if value:
            result.fields["dtype"] = name

    return convert


def _attention(result: Conversion, value: Any) -> None:
    if value:
        result.fields["attn_implementation"] = "flash_attention_2"


def _mode(result: Conversion, value: Any) -> None:
    if value not in (None, "structured", "async"):
        raise ConfigError(f"ebft.mode: {value} is not supported yet; only structured EBFT is converted")


_SPECIAL: dict[str, Callable[[Conversion, Any], None]] = {
    "adapter": _adapter,
    "lora_target_linear": _target_linear,
    "datasets": _datasets("train_dataset"),
    "test_datasets": _datasets("eval_dataset"),
    "bf16": _precision("bfloat16"),
    "fp16": _precision("float16"),
    "float32": _precision("float32"),
    "flash_attention": _attention,
    "mode": _mode,
}
