"""Whole runs of `ebft-ds train`: what they leave behind, exact resume, and how they end when something breaks."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft_ds.config import load_recipe
from ebft_ds.monitor.keys import unknown_keys
from tests.integration.cli_runs import (
    Finished,
    all_gone,
    end_tree,
    metrics,
    overrides,
    rollout_process,
    run,
    samples,
    start,
    tree,
    wait_for,
    without,
)

Data = tuple[Path, Path]

REPEATED = {"num_iterations": 3, "old_logprobs": "recompute", "max_staleness": 3}

EXPECTED_KEYS = {
    "step", "loss", "grad_norm", "learning_rate", "ebft/alignment", "ebft/diversity", "ebft/reward", "ebft/cfm_loss",
    "ebft/fm_loss_unbiased", "ebft/gram_identity_share", "ebft/empty_completions", "reward_std", "frac_reward_zero_std",
    "completions/mean_length", "completions/clipped_ratio", "sampling/importance_sampling_ratio/mean",
    "sampling/sampling_logp_difference/mean", "staleness/mean", "staleness/max", "staleness/dropped", "queue/depth",
    "policy_version", "sync/bytes", "sync/seconds", "sync/pause_seconds", "sync/probe_mean_gap", "sync/probe_max_gap",
    "time/wait_rollout", "time/score", "time/policy", "time/optim", "time/sync", "entropy", "clip_ratio/low",
    "clip_ratio/high", "perf/tokens_per_s", "perf/rollout_tokens_per_s", "perf/padding_ratio", "memory/peak_gb",
    "num_prompts_seen", "epoch",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished_run(tiny_model: Path, tiny_data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("finished")
    settings = overrides(
        tiny_model, tiny_data, folder / "run", eval_dataset=tiny_data[1], max_steps=5, warm_start_steps=1, ebft_ce_coef=0.1,
        save_steps=2, export_final=True,
    )  # fmt: skip
    return folder / "run", run(folder / "recipe.yaml", settings)


def test_asynchronous_run_ends_well_and_shows_before_and_after(finished_run: tuple[Path, Finished]) -> None:
    _, finished = finished_run
    assert finished.code == 0, finished.output[-4000:]
    assert "held-out: 6 prompts" in finished.output
    assert "fm_loss_unbiased, completion_mean" in finished.output
    assert "tensorboard --logdir" in finished.output


def test_metrics_have_every_documented_key_once_a_step(finished_run: tuple[Path, Finished]) -> None:
    output, _ = finished_run
    lines = metrics(output)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert unknown_keys({key for line in lines for key in line}) == []
    assert set(lines[-1]) >= EXPECTED_KEYS
    assert lines[1]["ce_loss"] > 0
    assert "ebft/reward" not in lines[1], "the warm start has no rollouts"
    assert all(line["sync/probe_mean_gap"] < 1e-4 for line in lines[2:])
    assert lines[-1]["policy_version"] == 5
    assert lines[0]["eval/cfm_loss"] > 0
    assert lines[-1]["eval/cfm_loss"] > 0


def test_tensorboard_holds_the_same_steps(finished_run: tuple[Path, Finished]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output, _ = finished_run
    events = EventAccumulator(str(output / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_resolved_configuration_is_a_recipe_again(finished_run: tuple[Path, Finished]) -> None:
    output, _ = finished_run
    again = load_recipe(output / "config.resolved.yaml").config
    assert (again.run.max_steps, again.peft.lora_r, again.loss.warm_start_steps) == (5, 4, 1)


def test_old_checkpoints_are_pruned_and_the_newest_is_the_last_step(finished_run: tuple[Path, Finished]) -> None:
    output, _ = finished_run
    assert sorted(p.name for p in (output / "checkpoints").iterdir() if p.is_dir()) == ["step_4", "step_5"]


def test_export_loads_with_transformers_and_peft_and_is_the_trained_model(finished_run: tuple[Path, Finished], tiny_model: Path) -> None:
    output, _ = finished_run
    merged, report = AutoModelForCausalLM.from_pretrained(output / "final", output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 14, 22, 7, 31]])
    untrained = base(ids).logits
    adapted = PeftModel.from_pretrained(base, output / "final" / "adapter")
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    assert (merged(ids).logits - untrained).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(output / "final").chat_template


def test_eval_and_export_of_a_checkpoint_leave_the_run_as_it_is(
    finished_run: tuple[Path, Finished], tiny_model: Path, tiny_data: Data, tmp_path: Path
) -> None:
    output, _ = finished_run
    before = (output / "metrics.jsonl").read_text()
    shutil.rmtree(output / "final", ignore_errors=True)
    settings = overrides(
        tiny_model, tiny_data, output, eval_dataset=tiny_data[1], max_steps=5, warm_start_steps=1, resume_from_checkpoint="auto"
    )
    evaluated = run(tmp_path / "recipe.yaml", settings, command="eval")
    assert evaluated.code == 0, evaluated.output[-4000:]
    numbers = json.loads(next(line for line in evaluated.output.splitlines() if line.startswith('{"step"')))
    last = metrics(output)[-1]
    assert numbers["step"] == 5
    assert numbers["reference_ce"] == pytest.approx(last["eval/reference_ce"], abs=1e-5)
    assert numbers["cfm_loss"] == pytest.approx(last["eval/cfm_loss"], abs=1e-4), "same weights, same prompts, same seeds"
    exported = run(tmp_path / "recipe.yaml", settings, command="export")
    assert exported.code == 0, exported.output[-4000:]
    assert (output / "final" / "model.safetensors").exists()
    assert (output / "metrics.jsonl").read_text() == before


def test_resume_repeats_the_uninterrupted_run_bit_for_bit_and_passes_over_a_damaged_checkpoint(
    tiny_model: Path, tiny_data: Data, tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    fields = {
        "max_staleness": 0, "lora_dropout": 0.1, "save_steps": 2, "save_total_limit": 5, "num_iterations": 2, "old_logprobs": "recompute",
        "max_train_rows": 2,  # the second pass takes the references' features from the cache
    }  # fmt: skip
    first = run(tmp_path / "recipe.yaml", overrides(tiny_model, tiny_data, whole, **fields))
    assert first.code == 0, first.output[-4000:]
    shutil.copytree(whole / "checkpoints", part / "checkpoints")
    cached = [len(load_file(path)["keys"]) for path in (part / "checkpoints" / "step_2").glob("reference_features_rank_*")]
    assert sum(cached) >= 2
    damaged = next((part / "checkpoints" / "step_4" / "engine").glob("*optim_states.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-100])

    second = run(tmp_path / "recipe.yaml", overrides(tiny_model, tiny_data, part, resume_from_checkpoint="auto", **fields))
    assert second.code == 0, second.output[-4000:]
    assert "passed over" in second.output
    assert "step_4" in second.output

    lines = metrics(whole)
    assert [line["num_prompts_seen"] for line in lines] == [2, 2, 4, 4], "two prompts, each batch for two steps"
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert ["ebft/reward" in line for line in lines] == [True, False, True, False], "scored once"
    assert [line["staleness/max"] for line in lines] == [0, 1, 0, 1]
    assert Counter(s["step"] for s in samples(whole)) == {1: 8, 3: 8}

    timeless = ("time/", "memory/", "perf/", "sync/", "num_prompts", "epoch", "queue/")
    expected = [without(line, *timeless) for line in metrics(whole) if line["step"] > 2]
    assert [without(line, *timeless) for line in metrics(part)] == expected
    assert expected[-1]["loss"] != 0
    texts = [(s["step"], s["prompt_id"], s["completion"]) for s in samples(whole) if s["step"] > 2]
    assert [(s["step"], s["prompt_id"], s["completion"]) for s in samples(part)] == texts


def test_ctrl_c_saves_and_exits_7_and_a_resume_trains_every_prompt_once(tiny_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start(tmp_path / "recipe.yaml", overrides(tiny_model, tiny_data, output, max_steps=400, **REPEATED))
    try:
        wait_for(lambda: len(metrics(output)) >= 2, "second step", process=process)
        everything = tree(process.pid)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    finally:
        end_tree(process.pid)
    assert process.returncode == 7, text[-4000:]
    assert "saved at step" in text
    assert all_gone(everything)

    done = metrics(output)[-1]["step"]
    settings = overrides(tiny_model, tiny_data, output, max_steps=done + 4, resume_from_checkpoint="auto", **REPEATED)
    resumed = run(tmp_path / "recipe.yaml", settings)
    assert resumed.code == 0, resumed.output[-4000:]
    assert [line["step"] for line in metrics(output)] == list(range(1, done + 5))
    new_groups = [line["step"] for line in metrics(output) if "ebft/reward" in line]
    batches = [step for step in range(1, done + 5) if (step - 1) % 3 == 0 or step == done + 1]
    assert new_groups == batches, "a resume takes new groups, and batches begin where they always do"
    trained = Counter((s["step"], s["prompt_id"]) for s in samples(output))
    prompts = [prompt for (_, prompt), _ in sorted(trained.items())]
    full_epochs, rest = divmod(len(prompts), 48)
    counts = Counter(prompts)
    assert set(counts.values()) <= {full_epochs, full_epochs + 1} | ({full_epochs + 2} if rest else set())
    if full_epochs == 0:
        assert max(counts.values()) == 1, "no prompt is trained twice in one pass"


def test_killed_rollout_process_ends_the_run_with_code_4(tiny_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start(tmp_path / "recipe.yaml", overrides(tiny_model, tiny_data, output, max_steps=400))
    try:
        wait_for(lambda: len(metrics(output)) >= 1, "first step", process=process)
        everything = tree(process.pid)
        rollout_process(process.pid).send_signal(signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
    finally:
        end_tree(process.pid)
    assert process.returncode == 4, text[-4000:]
    assert "rollout process" in text
    assert "SIGKILL" in text
    assert all_gone(everything)


def test_loss_that_is_not_finite_stops_the_run_naming_step_and_rank(tiny_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tiny_data, tmp_path / "run", warm_start_steps=3, warm_start_learning_rate=1e30)
    finished = run(tmp_path / "recipe.yaml", settings)
    assert finished.code == 1, finished.output[-4000:]
    assert "step 1, rank" in finished.output
    assert "the loss is nan" in finished.output


def test_full_fine_tuning_with_frozen_copy_and_kl(tiny_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tiny_data, tmp_path / "run", use_peft=False, lora_r=16, beta=0.05, max_steps=3, export_final=True)
    finished = run(tmp_path / "recipe.yaml", settings)
    assert finished.code == 0, finished.output[-4000:]
    lines = metrics(tmp_path / "run")
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-6), "before the first step the policy is the reference"
    assert lines[-1]["kl"] > 0
    assert all(line["sync/probe_mean_gap"] < 1e-4 for line in lines)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
