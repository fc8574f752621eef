"""Checks of the output folder and the model folder before anything is loaded. Without torch and transformers.

What needs a tokenizer or the data is in `ebft_ds.data.preflight`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ebft_ds.config.model_facts import ModelFacts, read_model_facts
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.errors import ConfigError, DataError, ModelError

RUN_FILES = ("config.resolved.yaml", "metrics.jsonl", "samples.jsonl", "tb", "logs", "checkpoints", "final")
"""What a run writes into output_dir."""
_MARKS = ("config.resolved.yaml", "metrics.jsonl", "checkpoints", "final")
_DATA_ENDINGS = (".jsonl", ".json", ".parquet", ".gz", ".csv")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def check_output_dir(config: RecipeConfig) -> Path:
    """The output folder, if a run may write there; nothing is created.

    Errors: ConfigError if it is not set, is a file, cannot be written, or holds another run that is neither resumed nor overwritten.
    """
    if not config.run.output_dir:
        raise ConfigError("output_dir is not set; it receives checkpoints, metrics and the exported model")
    folder = Path(config.run.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file; name a folder")
    held = [name for name in _MARKS if (folder / name).exists()]
    if held and not (config.run.resume_from_checkpoint or config.run.overwrite_output_dir):
        raise ConfigError(
            f"output_dir {folder} already holds a run ({', '.join(held)}). Continue it with resume_from_checkpoint=auto, "
            "replace it with overwrite_output_dir=true, or name another folder"
        )
    _check_writable(folder)
    return folder


def prepare_output_dir(config: RecipeConfig) -> Path:
    """Check and create the output folder (one process calls this). With `overwrite_output_dir` a former run's files are deleted,
    and only those: other files in the folder stay."""
    folder = check_output_dir(config)
    if config.run.overwrite_output_dir:
        for name in RUN_FILES:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_writable(folder: Path) -> None:
    """Write a temporary file where the folder is, or into the nearest folder above that exists."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"output_dir {folder}: {place} is a file, so no folder can be made below it")
    try:
        handle, name = tempfile.mkstemp(prefix=".ebft_ds_write_test_", dir=place)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be written: {error.strerror} in {place}") from None
    os.close(handle)
    os.unlink(name)


def check_model_files(config: RecipeConfig) -> ModelFacts | None:
    """Sizes from the model's config.json; None for a hub name (not looked up here). The feature model's folder is checked as well.

    Errors: ModelError for a folder that is missing or holds no configuration or no weights.
    """
    if config.model.feature_model_name_or_path:
        _check_folder(config.model.feature_model_name_or_path)
    if config.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set")
    return _check_folder(config.model.model_name_or_path)


def _check_folder(model: str) -> ModelFacts | None:
    facts = read_model_facts(model)
    if facts is None:
        return None
    folder = Path(model).expanduser()
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise ModelError(f"model folder {model} has no weights (*.safetensors or pytorch_model*.bin)")
    return facts


def check_dataset_paths(config: RecipeConfig) -> None:
    """DataError for a dataset that is plainly a path and does not exist; whether its content is usable is found out by the ranks."""
    for field, name in (("train_dataset", config.data.train_dataset), ("eval_dataset", config.data.eval_dataset)):
        if name is None or Path(name).exists():
            continue
        if name.startswith(("/", "./", "../")) or name.endswith(_DATA_ENDINGS):
            raise DataError(f"{field} {name} does not exist; paths are relative to the current directory, {Path.cwd()}")
