"""Reward trainings that fail or stop on one rank end on every rank; and exports whose base model pads with its EOS."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ebft_ds import RewardTrainer
from ebft_ds.collectives import Collectives
from ebft_ds.data.preference import RewardCollator, RewardEncoding
from ebft_ds.errors import EbftError
from ebft_ds.packing.packer import RowPacker
from tests.distributed.ranks import run_ranks
from tests.distributed.test_reward_trainer import HELD_OUT, ROWS, config
from tools.preference_task import make_preference_task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preference_task(tmp_path_factory.mktemp("task"), rows=8, held_out=2) / "model"


def collator_of_a_user(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    raise KeyError("no such column")


def what_is_raised(trainer: RewardTrainer, action: str = "train") -> tuple[str, str]:
    try:
        getattr(trainer, action)()
    except EbftError as error:
        return type(error).__name__, str(error)
    finally:
        trainer.close()
    return "none", ""


def failures_run(collectives: Collectives, model: Path, output: Path) -> dict[str, tuple[str, str]]:
    """Class and message on this rank."""
    quiet: dict[str, Any] = {"max_steps": 1, "export_final": False, "eval_at_start": False}
    RewardTrainer(str(model), config(output, **quiet), train_dataset=ROWS).train()
    resumed = RewardTrainer(str(model), config(output, resume_from_checkpoint="auto", **quiet), train_dataset=ROWS[1:])
    found = {"other data": what_is_raised(resumed)}
    collated = RewardTrainer(str(model), config(output / "c", **quiet), train_dataset=ROWS, data_collator=collator_of_a_user)
    found["collator"] = what_is_raised(collated)
    return found | {"stop": stopped_evaluation(collectives, model, output / "s")}


def stopped_evaluation(collectives: Collectives, model: Path, output: Path) -> tuple[str, str]:
    """Rank 1 is sent a stop while its first micro-batch of an evaluation is built; no second one is."""
    trainer = RewardTrainer(
        str(model), config(output, per_device_eval_batch_size=1, packing="padded"), train_dataset=ROWS, eval_dataset=HELD_OUT
    )
    trainer.configure_functions()
    build, built = RowPacker.build, []

    def watched(packer: RowPacker, *arguments: Any, **options: Any) -> Any:
        built.append(1)
        if collectives.rank == 1:
            trainer._stop._first = 0.0
        return build(packer, *arguments, **options)

    RowPacker.build = watched  # type: ignore[method-assign, assignment]
    try:
        name, _ = what_is_raised(trainer, "evaluate")
    finally:
        RowPacker.build = build  # type: ignore[method-assign]
    return name, f"{len(built)} micro-batches"


def test_every_rank_ends(model: Path, tmp_path: Path) -> None:
    main, other = run_ranks(2, failures_run, model, tmp_path / "run")
    assert main["other data"][0] == "CheckpointError"
    assert "other data" in main["other data"][1]
    assert other["other data"][0] == "PeerError"
    assert main["collator"][0] == "DataError"
    assert "data_collator collator_of_a_user raised KeyError: 'no such column' (rows " in main["collator"][1]
    assert other["collator"][0] == "PeerError"
    assert main["stop"] == other["stop"] == ("Preempted", "1 micro-batches")


def padded_export_run(collectives: Collectives, model: Path, output: Path) -> list[list[float]]:
    """Trains a step, exports, and gives the engine's own scores."""
    trainer = RewardTrainer(str(model), config(output, max_steps=1), train_dataset=ROWS, eval_dataset=HELD_OUT)
    trainer.train()
    parts = trainer._parts
    assert parts is not None
    return parts.held_out.score(parts.held_out.sets[""])


def test_library_scores_padded_batches_of_a_model_whose_pad_was_its_eos(model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(source)
    [wanted] = run_ranks(1, padded_export_run, source, tmp_path / "run")
    final = tmp_path / "run" / "final"
    exported = AutoTokenizer.from_pretrained(final)
    network = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float32).eval()
    assert network.config.pad_token_id == exported.pad_token_id is not None
    assert exported.pad_token_id != tokenizer.eos_token_id == exported.eos_token_id
    batch = RewardCollator(exported, encoding=RewardEncoding.load(final))(HELD_OUT)
    assert batch["attention_mask"].min() == 0, "there is padding"
    with torch.no_grad():
        found = network(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    best_first = [row[place] for place in (0, 1) for row in wanted]
    torch.testing.assert_close(found, torch.tensor(best_first), rtol=0, atol=1e-4)
    network.config.pad_token_id = tokenizer.eos_token_id
    with torch.no_grad():
        wrong = network(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert (wrong - found).abs().max() > 1e-3, "with the pad of the base model the token before the end is scored"
