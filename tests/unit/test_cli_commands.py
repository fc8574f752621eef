"""The command line as a user meets it: help, messages, exit codes. Run as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebft_ds.config import LoadedRecipe, load_recipe
from ebft_ds.errors import ConfigError
from ebft_ds.train import check_world_size, parse_arguments

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str, poison: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*([str(poison)] if poison else []), str(ROOT)])
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-m", "ebft_ds.cli.app", *arguments],
        env={**clean, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def poison(tmp_path: Path) -> Path:
    """A folder whose torch, transformers, ... cannot be imported."""
    folder = tmp_path / "poison"
    folder.mkdir()
    for name in ("torch", "transformers", "deepspeed", "peft", "datasets"):
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} was imported')\n")
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(sizes))
    (model / "model.safetensors").write_bytes(b"")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{model_name_or_path: {model}, dtype: float32}}\n"
        f"data: {{train_dataset: rows.jsonl, max_seq_length: 64}}\nmax_completion_length: 16\n"
        f"max_steps: 3\noutput_dir: {tmp_path / 'out'}\n"
    )
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("train", "--help"),
        ("config", "--help"),
        ("config", "explain", "--all"),
        ("config", "schema"),
        ("doctor", "-h"),
    ],
)
def test_help_and_explanations_need_no_torch(poison: Path, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, poison=poison)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_config_errors_and_types_load_without_torch(poison: Path) -> None:
    code = "import ebft_ds, ebft_ds.config, ebft_ds.errors, ebft_ds.types; ebft_ds.AsyncEBFTConfig(seed=1)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(poison), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_show_plan_and_mistakes_need_no_torch(poison: Path, recipe: Path) -> None:
    shown = run("config", "show", str(recipe), "seed=3", poison=poison)
    assert shown.returncode == 0, shown.stderr
    assert "seed: 3" in shown.stdout
    planned = run("plan", str(recipe), "--rows", "100", "--ranks", "2", poison=poison)
    assert planned.returncode == 0, planned.stderr
    assert "16 completions (4 prompts x 4)" in planned.stdout
    assert "frozen feature copy" in planned.stdout
    refused = run("train", str(recipe), "num_generations=3", "ebft_feature_layers=[3]", "num_processes=2", poison=poison)
    assert refused.returncode == 2
    assert "no multiple of num_generations 3" in refused.stderr
    assert "the model has 2 layers" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("train",), 2, "RECIPE"),
        (("no-such-command",), 2, "no-such-command"),
        (("train", "absent.yaml"), 2, "cannot read recipe absent.yaml"),
        (("config", "explain", "temprature"), 2, "did you mean temperature?"),
        (("samples", "absent"), 3, "does not exist"),
        (("runs", "compare", "absent"), 3, "absent"),
        (("convert-config", "absent.yaml"), 2, "absent.yaml"),
    ],
)
def test_mistakes_are_one_message_and_a_code(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_train_refuses_before_starting_ranks(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    done = run("train", str(recipe))
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    missing = run("train", str(recipe), f"model_name_or_path={tmp_path / 'absent'}", f"output_dir={tmp_path / 'new'}")
    assert missing.returncode == 2
    assert "does not exist" in missing.stderr
    world = run("train", str(recipe), f"output_dir={tmp_path / 'new'}", WORLD_SIZE="3")
    assert world.returncode == 2
    assert "WORLD_SIZE=3" in world.stderr
    assert not (tmp_path / "new").exists()


def test_a_missing_dataset_is_bad_data(recipe: Path, tmp_path: Path) -> None:
    done = run("train", str(recipe), f"train_dataset={tmp_path / 'absent.jsonl'}")
    assert done.returncode == 3
    assert "absent.jsonl does not exist" in done.stderr


def test_dry_run_refuses_a_folder_without_tokenizer(recipe: Path) -> None:
    done = run("train", str(recipe), "--dry-run")
    assert done.returncode == 2
    assert "tokenizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_convert_config_writes_a_recipe_that_loads(tmp_path: Path) -> None:
    source, target = tmp_path / "axolotl.yaml", tmp_path / "recipe.yaml"
    source.write_text("base_model: org/model\nrl: ebft\nsample_packing: true\ntrl: {num_generations: 8}\n")
    done = run("convert-config", str(source), "-o", str(target))
    assert done.returncode == 0, done.stderr
    assert "left out: sample_packing" in done.stderr
    assert load_recipe(target).config.rollout.num_generations == 8
    assert run("convert-config", str(source), "-o", str(target)).returncode == 2


def loaded(**fields: object) -> LoadedRecipe:
    from ebft_ds import AsyncEBFTConfig

    return LoadedRecipe(AsyncEBFTConfig(**fields))


def test_a_launcher_that_contradicts_num_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert check_world_size(loaded()) == 4
    assert check_world_size(loaded(num_processes=4)) == 4
    with pytest.raises(ConfigError, match=r"num_processes: 2 .* the launcher started 4"):
        check_world_size(loaded(num_processes=2))
    monkeypatch.delenv("WORLD_SIZE")
    assert check_world_size(loaded()) == 1
    with pytest.raises(ConfigError, match="single process"):
        check_world_size(loaded(num_processes=2))


def test_the_launchers_local_rank_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("LOCAL_RANK")
    assert parse_arguments(["--local_rank=1", "r.yaml", "seed=1"]) == ("train", "r.yaml", ["seed=1"])
    assert os.environ["LOCAL_RANK"] == "1"
    assert parse_arguments(["--task=eval", "r.yaml"]) == ("eval", "r.yaml", [])
    assert parse_arguments(["--local-rank", "3", "r.yaml"]) == ("train", "r.yaml", [])
    with pytest.raises(ConfigError, match="unknown option"):
        parse_arguments(["r.yaml", "--steps=3"])
    with pytest.raises(ConfigError, match="no recipe"):
        parse_arguments(["--local_rank=0"])
