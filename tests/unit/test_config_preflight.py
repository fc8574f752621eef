"""Output folder and model folder before a run; the resolved configuration after it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ebft_ds.config import AsyncEBFTConfig, load_recipe
from ebft_ds.config.preflight import check_model_files, check_output_dir, prepare_output_dir
from ebft_ds.config.resolved import write_resolved
from ebft_ds.errors import ConfigError, ModelError


def at(folder: Path, **fields: object) -> AsyncEBFTConfig:
    return AsyncEBFTConfig(output_dir=str(folder), **fields)


def test_a_new_folder_is_fine_and_not_yet_made(tmp_path: Path) -> None:
    check_output_dir(at(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    prepare_output_dir(at(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("mark", ["config.resolved.yaml", "metrics.jsonl"])
def test_another_run_is_not_mixed_in(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).write_text("x")
    with pytest.raises(ConfigError, match="already holds a run"):
        check_output_dir(at(tmp_path))
    check_output_dir(at(tmp_path, resume_from_checkpoint="auto"))
    check_output_dir(at(tmp_path, overwrite_output_dir=True))
    assert (tmp_path / mark).exists()


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("x")
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    prepare_output_dir(at(tmp_path, overwrite_output_dir=True))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_files_of_somebody_else_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    check_output_dir(at(tmp_path))


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        check_output_dir(at(tmp_path / "file"))
    with pytest.raises(ConfigError, match="is a file, so no folder"):
        check_output_dir(at(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="output_dir is not set"):
        check_output_dir(AsyncEBFTConfig())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    if os.geteuid() == 0:  # root may write anywhere: the refusal of the file system is injected

        def refuse(*_args: object, **_named: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tempfile.mkstemp", refuse)
    else:
        folder.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        check_output_dir(at(folder))


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_model_folders(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    facts = check_model_files(AsyncEBFTConfig(model_name_or_path=str(model)))
    assert facts is not None
    assert facts.num_layers == 2
    assert check_model_files(AsyncEBFTConfig(model_name_or_path="owner/name")) is None
    with pytest.raises(ModelError, match="does not exist"):
        check_model_files(AsyncEBFTConfig(model_name_or_path=str(tmp_path / "absent")))
    with pytest.raises(ModelError, match="does not exist"):
        check_model_files(AsyncEBFTConfig(model_name_or_path=str(model), feature_model_name_or_path="./absent"))
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        check_model_files(AsyncEBFTConfig(model_name_or_path=str(model)))
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        check_model_files(AsyncEBFTConfig(model_name_or_path=str(model)))
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_model_files(AsyncEBFTConfig(model_name_or_path=str(model)))


def test_the_resolved_configuration_is_the_same_recipe(tmp_path: Path) -> None:
    config = AsyncEBFTConfig(
        learning_rate=1e-5,
        adam_epsilon=1e-10,
        ebft_feature_layers=[0.5, 2],
        generation_kwargs={"top_k": 5},
        lr_groups=[{"name": "head", "modules": ["lm_head"], "lr": 3e-7}],
        system_prompt="Line one\nline: two # no comment",
        deepspeed={"zero_optimization": {"overlap_comm": False}},
        seed=7,
    )
    path = tmp_path / "config.resolved.yaml"
    write_resolved(path, config, ["ebft-ds", "train", "a recipe.yaml"], {"torch": "2.13.0"}, "abc123")
    loaded = load_recipe(path)
    assert loaded.config == config
    assert loaded.notes == []
    text = path.read_text()
    for part in ("# command: ebft-ds train 'a recipe.yaml'", "# git_commit: abc123", "# torch: 2.13.0"):
        assert part in text
    assert [item.name for item in tmp_path.iterdir()] == ["config.resolved.yaml"]
