"""RewardTrainer on real ranks: equal evaluations, exact resume, step functions, collators, named sets, exports."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ebft_ds import RewardConfig, RewardTrainer
from ebft_ds.collectives import Collectives
from ebft_ds.data.preference import RewardCollator, RewardEncoding
from ebft_ds.errors import CheckpointError, ConfigError, EbftError
from ebft_ds.rewards.preference_results import PreferenceResults
from ebft_ds.trainers.callbacks import TrainerCallback, TrainerControl, TrainerState
from tests.distributed.engines import PARTITION_ALL
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.integration.cli_runs import metrics
from tools.preference_task import make_preference_task, preference_rows

ROWS = preference_rows(40, random.Random(3))
HELD_OUT = preference_rows(13, random.Random(4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preference_task(tmp_path_factory.mktemp("task"), rows=8, held_out=2) / "model"


def config(output: Path, **fields: Any) -> RewardConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(output), "dtype": "float32", "max_length": 48, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "max_steps": 4, "save_total_limit": None, "report_to": [], "deepspeed": PARTITION_ALL,
    }  # fmt: skip
    return RewardConfig(**(defaults | fields))


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metrics(output) if "loss" in line]


class Stopper(TrainerCallback):
    """Asks for a checkpoint and the end after two steps; notes the evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, PreferenceResults]] = []

    def on_step_end(self, state: TrainerState, control: TrainerControl, metrics: dict[str, float | None]) -> None:
        control.should_stop = state.step == 2

    def on_evaluate(self, state: TrainerState, result: Any) -> None:
        self.evaluations.append(result)


def evaluation_run(collectives: Collectives, model: Path, output: Path) -> dict[str, Any]:
    """Two named sets of uneven sizes, one with rankings, before any training."""
    ranked = [{"prompt": r["prompt"], "responses": [r["chosen"], r["rejected"], r["rejected"] + " x"]} for r in HELD_OUT[:5]]
    sets = {"pairs": HELD_OUT, "ranked": Dataset.from_list(ranked)}
    trainer = RewardTrainer(str(model), config(output), train_dataset=ROWS, eval_dataset=sets)
    return {name: one.to_metrics() for name, one in trainer.evaluate().items()}


def test_two_world_sizes_give_the_same_numbers(model: Path, tmp_path: Path) -> None:
    alone = run_ranks(1, evaluation_run, model, tmp_path / "one")[0]
    assert alone["pairs"]["eval/rows"] == 13
    assert alone["ranked"]["eval/pairs"] == 15
    assert {"eval/subset/word 1", "eval/accuracy", "eval/ece", "eval/reward_std"} <= alone["pairs"].keys()
    for answer in run_ranks(2, evaluation_run, model, tmp_path / "two"):
        for name, numbers in alone.items():
            assert answer[name] == pytest.approx(numbers, abs=2e-5)
            assert answer[name]["eval/accuracy"] == numbers["eval/accuracy"]
    assert metrics(tmp_path / "two")[0]["eval/pairs/accuracy"] == alone["pairs"]["eval/accuracy"]


def resume_run(collectives: Collectives, model: Path, output: Path, resumed: Path, stream: bool) -> None:
    """An uninterrupted run, and one that stops after two steps and is resumed."""

    def trainer(folder: Path, callback: TrainerCallback | None = None, **fields: Any) -> RewardTrainer:
        fields = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.1, "shuffle_buffer_size": 7, "max_steps": 24} | fields
        rows = Dataset.from_list(ROWS).to_iterable_dataset() if stream else ROWS
        return RewardTrainer(
            str(model), config(folder, **fields), train_dataset=rows, eval_dataset=HELD_OUT, callbacks=[callback] if callback else None
        )

    trainer(output).train()
    stopper = Stopper()
    trainer(resumed, stopper, export_final=False).train()
    assert len(stopper.evaluations) == 2
    trainer(resumed, resume_from_checkpoint="auto").train()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stream", [False, True])
def test_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(model: Path, tmp_path: Path, stream: bool) -> None:
    run_ranks(2, resume_run, model, tmp_path / "whole", tmp_path / "part", stream)
    expected = losses(tmp_path / "whole")
    assert len(expected) == 24, "several epochs"
    assert losses(tmp_path / "part") == expected
    last = [metrics(tmp_path / folder)[-1] for folder in ("whole", "part")]
    assert last[0]["eval/loss"] == last[1]["eval/loss"]
    assert last[0]["num_rows_seen"] == last[1]["num_rows_seen"] == 96
    assert last[0]["epoch"] == last[1]["epoch"]


def other_data_run(collectives: Collectives, model: Path, output: Path) -> str:
    RewardTrainer(str(model), config(output, max_steps=1, export_final=False), train_dataset=ROWS).train()
    trainer = RewardTrainer(str(model), config(output, resume_from_checkpoint="auto"), train_dataset=ROWS[1:])
    try:
        trainer.train()
    except CheckpointError as error:
        return str(error)
    return "none"


def test_other_training_data_is_refused_on_resume(model: Path, tmp_path: Path) -> None:
    assert "other data" in run_ranks(1, other_data_run, model, tmp_path / "run")[0]


def functions_run(collectives: Collectives, model: Path, output: Path, compiled: bool, lora: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"use_peft": True, "lora_r": 2} if lora else {}
    trainer = RewardTrainer(
        str(model), arguments=config(output, torch_compile=compiled, **fields), train_dataset=ROWS, eval_dataset=HELD_OUT
    )
    functions = trainer.configure_functions()
    feed = trainer._parts.feed  # type: ignore[union-attr]
    found = [functions.train_step(feed.next_rows(4)) for _ in range(3)]
    return {
        "steps": [(m["loss"], m["grad_norm"], m["learning_rate"], m["reward/accuracy"]) for m in found],
        "rewards": functions.eval_step(feed.next_rows(3)),
        "state": (trainer.state.step, trainer.state.prompts_seen),
    }


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lora", [False, True])
def test_compiled_step_functions_equal_plain_ones(model: Path, tmp_path: Path, lora: bool) -> None:
    plain = run_ranks(2, functions_run, model, tmp_path / "plain", False, lora)
    compiled = run_ranks(2, functions_run, model, tmp_path / "compiled", True, lora)
    for one, other in zip(plain, compiled, strict=True):
        assert one["state"] == other["state"] == (3, 12)
        torch.testing.assert_close(torch.tensor(other["steps"]), torch.tensor(one["steps"]), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(torch.tensor(other["rewards"]), torch.tensor(one["rewards"]), rtol=1e-3, atol=1e-4)
        assert one["steps"][0][0] != one["steps"][2][0], "the steps move the weights"


def collator_run(collectives: Collectives, model: Path, output: Path) -> list[float]:
    """Losses with the recipe's own encoding, then through a collator that gives the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    collator = RewardCollator(tokenizer, encoding=RewardEncoding(max_length=48))
    for folder, given in ((output / "own", None), (output / "collated", collator)):
        trainer = RewardTrainer(str(model), config(folder, export_final=False), train_dataset=ROWS, data_collator=given)
        trainer.train()
    return losses(output / "own") + losses(output / "collated")


def test_users_collator_gives_the_rows(model: Path, tmp_path: Path) -> None:
    found = run_ranks(2, collator_run, model, tmp_path)[0]
    assert len(found) == 8
    assert found[:4] == pytest.approx(found[4:], abs=1e-5)


def dropping(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {
        "input_ids_chosen": [[5, 6]],
        "attention_mask_chosen": [[1, 1]],
        "input_ids_rejected": [[5, 7]],
        "attention_mask_rejected": [[1, 1]],
    }


def errors_run(collectives: Collectives, model: Path, output: Path) -> dict[str, tuple[str, int, str]]:
    """What wrong inputs raise: class, exit code, message."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bad row": ({}, {"train_dataset": [{"chosen": "a"}] * 8}),
        "few rows": ({}, {"train_dataset": ROWS[:1]}),
        "endless stream": ({"max_steps": -1}, {"train_dataset": Dataset.from_list(ROWS).to_iterable_dataset()}),
        "collator drops rows": ({}, {"train_dataset": ROWS, "data_collator": dropping}),
        "bad evaluation": ({}, {"train_dataset": ROWS, "eval_dataset": {"odd": [{"chosen": 1, "rejected": "b"}]}}),
        "ebft field": ({"num_generations": 9}, {"train_dataset": ROWS}),
        "no such file": ({}, {"train_dataset": str(output / "none.jsonl")}),
    }
    found = {}
    for name, (fields, objects) in cases.items():
        trainer = RewardTrainer(str(model), config(output / name, **fields), **objects)
        try:
            trainer.train()
        except EbftError as error:
            found[name] = (type(error).__name__, error.exit_code, str(error))
    return found


def test_wrong_inputs_are_named(model: Path, tmp_path: Path) -> None:
    found = run_ranks(1, errors_run, model, tmp_path)[0]
    assert {name: code for name, (_, code, _) in found.items()} == {
        "bad row": 3, "few rows": 3, "endless stream": 2, "collator drops rows": 3, "bad evaluation": 3, "ebft field": 2, "no such file": 3,
    }  # fmt: skip
    assert "rejected" in found["bad row"][2]
    assert "max_steps" in found["endless stream"][2]
    assert "num_generations" in found["ebft field"][2]
    with pytest.raises(ConfigError, match="two names of one thing"):
        RewardTrainer("m", RewardConfig(), arguments=RewardConfig())


def export_run(collectives: Collectives, model: Path, output: Path, way: str) -> None:
    fields: dict[str, Any] = {"export_merged": way != "adapter alone", "eval_at_start": False}
    adapter = None if way == "full" else LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    RewardTrainer(str(model), config(output, **fields), train_dataset=ROWS, eval_dataset=HELD_OUT, peft_config=adapter).train()


@pytest.fixture(scope="module")
def exports(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RankAnswers:
    folder = tmp_path_factory.mktemp("exports")

    def run(way: str) -> list[Any]:
        run_ranks(2, export_run, model, folder / way, way)
        return [folder / way]

    return RankAnswers(run)


def test_export_is_a_classifier_with_its_recipe(exports: RankAnswers, model: Path) -> None:
    output = exports["full"][0]
    network, report = AutoModelForSequenceClassification.from_pretrained(output / "final", output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert network.config.num_labels == 1
    assert network.config.architectures == ["LlamaForSequenceClassification"]
    encoding, last = RewardEncoding.load(output / "final"), metrics(output)[-1]
    assert encoding.max_length == 48
    assert encoding.mean == pytest.approx(last["eval/reward_mean"])
    assert encoding.std == pytest.approx(last["eval/reward_std"])
    assert scores_of(network, output / "final", encoding) == pytest.approx(last["eval/reward_mean"], abs=1e-4)


def scores_of(network: Any, folder: Path, encoding: RewardEncoding) -> float:
    """Mean reward of all held-out responses, as the library's own batches score them."""
    batch = RewardCollator(AutoTokenizer.from_pretrained(folder), encoding=encoding)(HELD_OUT)
    with torch.no_grad():
        return float(network.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.mean())


def test_adapter_loads_with_peft_and_equals_the_merged_model(exports: RankAnswers, model: Path) -> None:
    output = exports["merged"][0]
    encoding = RewardEncoding.load(output / "final")
    merged = AutoModelForSequenceClassification.from_pretrained(output / "final", dtype=torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, output / "final" / "adapter")
    wanted = metrics(output)[-1]["eval/reward_mean"]
    assert scores_of(merged, output / "final", encoding) == pytest.approx(wanted, abs=1e-4)
    assert scores_of(adapted, output / "final", encoding) == pytest.approx(wanted, abs=1e-4)


def test_adapter_alone_brings_the_head(exports: RankAnswers, model: Path) -> None:
    output = exports["adapter alone"][0]
    assert not (output / "final" / "model.safetensors").exists()
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, output / "final")
    wanted = metrics(output)[-1]["eval/reward_mean"]
    assert scores_of(adapted, output / "final", RewardEncoding.load(output / "final")) == pytest.approx(wanted, abs=1e-4)


def again_run(collectives: Collectives, model: Path, output: Path) -> tuple[float, float]:
    """A trained reward model evaluated as it is, its own head kept."""
    trainer = RewardTrainer(str(model), config(output), train_dataset=ROWS, eval_dataset=HELD_OUT)
    found = trainer.evaluate(record=False)[""]
    return found.mean, found.accuracy


def test_exported_model_can_be_trained_on_and_evaluates_the_same(exports: RankAnswers, tmp_path: Path) -> None:
    output = exports["full"][0]
    mean, accuracy = run_ranks(1, again_run, output / "final", tmp_path / "again")[0]
    last = metrics(output)[-1]
    assert mean == pytest.approx(last["eval/reward_mean"], abs=1e-4)
    assert accuracy == last["eval/accuracy"]


def test_collect_functions_honour_their_parameters(model: Path, tmp_path: Path) -> None:
    trainer = RewardTrainer(str(model), config(tmp_path, prompt_field="prompt"), train_dataset=ROWS)
    for make in (trainer.create_grain_collect_function, trainer.create_tfds_collect_function):
        for mode in ("keep_end", "keep_start"):
            found = make(6, truncation_mode=mode)(ROWS[0])
            assert found["input_ids_chosen"].shape == (6,)
        whole = make(64)(ROWS[0])
        length = int(whole["attention_mask_chosen"].sum())
        assert 6 < length < 64
        assert make(6)(ROWS[0])["input_ids_chosen"].tolist() == whole["input_ids_chosen"][length - 6 : length].tolist()
        with pytest.raises(ConfigError):
            make(6, truncation_mode="drop")


def test_trainers_collator_is_the_recipes(model: Path, tmp_path: Path) -> None:
    changed = [row | {"note": "n"} for row in ROWS[:3]]
    trainer = RewardTrainer(str(model), config(tmp_path, pad_to_multiple_of=32, remove_unused_columns=False), train_dataset=ROWS)
    batch = trainer.data_collator(changed)
    assert batch["input_ids_chosen"].shape == (3, 32)
    assert batch["note"] == ["n"] * 3
    assert trainer.create_grain_collect_function(40)(ROWS[0])["input_ids_chosen"].shape == (64,)
    assert RewardTrainer(str(model), config(tmp_path), train_dataset=ROWS, data_collator=dropping).data_collator is dropping
