"""`ebft-ds serve` and `train` before they start anything: which servers a recipe means, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.cli.serve import serving_config
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def recipe(**fields: Any) -> AsyncEBFTConfig:
    return AsyncEBFTConfig(**({"model_name_or_path": "org/model"} | fields))


def test_serving_takes_the_first_gpus_that_suffice() -> None:
    config = serving_config(recipe(vllm_num_servers=2, vllm_tensor_parallel_size=2), ["0", "1", "2", "3", "4"])
    assert config.vllm.vllm_devices == [0, 1, 2, 3]
    assert serving_config(recipe(vllm_devices=[7]), ["6", "7"]).vllm.vllm_devices == [7]
    assert serving_config(recipe(dtype="float32"), []).vllm.vllm_devices is None


def test_an_attaching_trainings_recipe_serves_as_well() -> None:
    config = serving_config(recipe(vllm_server_base_url="http://node7:8000", rollout_device="cpu", rollout_engine="auto"), ["0"])
    assert (config.vllm.vllm_launch, config.vllm.vllm_server_base_url, config.rollout.rollout_engine) == (True, None, "vllm")


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="its trainer, which starts it itself"):
        serving_config(recipe(vllm_colocate=True), ["0"])
    with pytest.raises(ConfigError, match=r"names 1 GPU\(s\)"):
        serving_config(recipe(vllm_num_servers=2), ["0"])
    with pytest.raises(ConfigError, match="below max_seq_length"):
        serving_config(recipe(vllm_max_model_len=10), ["0"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe, and a model folder that passes for one."""
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(sizes))
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{model_name_or_path: {model}, dtype: float32}}\ntrain_dataset: {tmp_path / 'rows.jsonl'}\n"
        f"max_seq_length: 64\nmax_completion_length: 16\noutput_dir: {tmp_path / 'out'}\n"
    )
    return tmp_path


def run(command: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "EBFT_VLLM_API_KEY")}
    return subprocess.run(
        [sys.executable, "-m", "ebft_ds.cli.app", command, str(folder / "recipe.yaml"), *overrides],
        env=clean | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "overrides", "reason"),
    [
        ("serve", ["vllm.host=0.0.0.0", "vllm.advertise_host=node7"], "so a key is made; --endpoints FILE"),
        ("serve", ["vllm.server_args=[--port, '1']"], "--port: use vllm_port"),
        ("train", ["vllm_server_base_url=http://node7:8000"], "is another machine and there is no key"),
        ("train", ["vllm_server_base_url=file:none.json"], "endpoints file none.json does not exist"),
        ("train", ["vllm.launch=true", "vllm.port=1", "vllm.host=198.51.100.7"], "no address of this machine"),
    ],
)
def test_bad_recipes_end_with_code_2_before_anything_starts(folder: Path, command: str, overrides: list[str], reason: str) -> None:
    done = run(command, folder, *overrides)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert not (folder / "out").exists()
    assert not (folder / "vllm_logs").exists()
