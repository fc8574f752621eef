"""A user's script for the Python trainer, started by DeepSpeed's launcher in test_launcher.py: trainer_script.py MODEL OUTPUT."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig

from ebft_ds import AsyncEBFTConfig, AsyncEBFTTrainer
from ebft_ds.trainers.callbacks import TrainerCallback, TrainerControl, TrainerState
from ebft_ds.types import RolloutGroup, ScoredGroup
from tools.demo_text import distinct_examples


class Recorder(TrainerCallback):
    """Writes down the order of the hooks, adds a metric, asks for a checkpoint after the first step and for the end after the third."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_begin(self, state: TrainerState, control: TrainerControl) -> None:
        self.calls.append("begin")

    def on_groups(self, state: TrainerState, groups: Sequence[RolloutGroup]) -> None:
        self.calls.append(f"groups {len(groups)}")

    def on_scored(self, state: TrainerState, groups: Sequence[ScoredGroup]) -> None:
        self.calls.append(f"scored {len(groups[0].reward)}")

    def on_step_end(self, state: TrainerState, control: TrainerControl, metrics: dict[str, float | None]) -> None:
        self.calls.append("step")
        metrics["custom/seven"] = 7.0
        control.should_save, control.should_stop = state.step == 1, state.step == 3

    def on_save(self, state: TrainerState, checkpoint: Path) -> None:
        self.calls.append(f"save {checkpoint.name}")

    def on_train_end(self, state: TrainerState) -> None:
        self.calls.append("end")


def brevity(completions: list[str], **_: object) -> list[float | None]:
    """A further objective with gaps."""
    return [None if not text else -float(len(text)) for text in completions]


def main() -> None:
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    model, output = arguments
    rows = [{"question": [{"role": "user", "content": e.question}], "answer": e.reference} for e in distinct_examples(random.Random(5), 24)]
    recorder = Recorder()
    trainer = AsyncEBFTTrainer(
        model,
        AsyncEBFTConfig(
            output_dir=output, dtype="float32", max_steps=5, num_generations=4, per_device_train_batch_size=4, max_seq_length=96,
            max_completion_length=12, ebft_adaptive_min_tokens=8, prompt_field="question", ground_truth_field="answer", export_final=False,
            eval_num_generations=2, reward_weights=[1.0, 0.01], eval_at_start=False, eval_at_end=False,
            num_iterations=2, old_logprobs="engine", vllm_importance_sampling_mode="none",
        ),
        train_dataset=Dataset.from_list(rows[:20]),
        eval_dataset=rows[20:],
        callbacks=[recorder],
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        reward_funcs=brevity,
    )  # fmt: skip
    state = trainer.train()
    result = trainer.evaluate()
    assert result is not None
    trainer.close()
    if dist.get_rank() == 0:
        facts = {"calls": recorder.calls, "step": state.step, "world_size": dist.get_world_size(), "ended": result.ended_share}
        (Path(output) / "facts.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
