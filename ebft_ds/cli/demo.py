"""`ebft-ds demo`: the main job on a tiny model that is made on the spot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from ebft_ds.errors import ConfigError, EbftError


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the tiny model and the run.")] = Path("demo_run"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 40,
    vllm: Annotated[bool, typer.Option("--vllm", help="Generate with a vLLM server that is started with the run.")] = False,
) -> None:
    """Make a tiny model, train it with EBFT on two ranks for about 40 steps, and show held-out numbers before and after.

    Needs a source checkout: the tiny model's text and maker are in tools/.
    """
    from ebft_ds.cli.train import start_ranks
    from ebft_ds.config import load_recipe

    root = Path(__file__).resolve().parent.parent.parent
    maker, recipe = root / "tools" / "make_tiny_model.py", root / "launch" / "recipes" / "demo.yaml"
    if not (maker.exists() and recipe.exists()):
        raise ConfigError(
            f"ebft-ds demo needs a source checkout with tools/ and launch/; {root} is none. Clone the repository and run make demo"
        )
    base = output / ("base_vllm" if vllm else "base")
    if not (base / "model" / "config.json").exists():
        print("Making a tiny model and its prompts (about a minute) ...", flush=True)
        heads = ["--num-heads", "2"] if vllm else []  # vLLM on the CPU knows no heads as small as the other model's
        made = subprocess.run([sys.executable, str(maker), "--output", str(base), *heads], check=False)
        if made.returncode != 0:
            raise EbftError(f"the tiny model could not be made (exit code {made.returncode}); its output is above")
    overrides = [
        f"model_name_or_path={base / 'model'}",
        f"train_dataset={base / 'train.jsonl'}",
        f"eval_dataset={base / 'eval.jsonl'}",
        f"output_dir={output / 'run'}",
        *(["vllm_launch=true", "vllm_max_num_seqs=64"] if vllm else []),
        "overwrite_output_dir=true",
        f"max_steps={steps}",
    ]
    code = start_ranks(load_recipe(recipe, overrides), str(recipe), overrides)
    if code == 0:
        print(f"\nThe trained model is in {output / 'run' / 'final'}. See the curves with: tensorboard --logdir {output / 'run' / 'tb'}")
    raise typer.Exit(code)
