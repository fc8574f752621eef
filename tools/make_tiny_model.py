"""Make a tiny chat model from nothing, with training and held-out prompts, in about a minute on a CPU.

    python tools/make_tiny_model.py --output DIR [--steps N] [--seed S] [--quick]

writes DIR/model (Hugging Face format, float32), DIR/train.jsonl and DIR/eval.jsonl. The model is pretrained on the text of
`demo_text.py`, in which only a part of the answers have the manner of the references (`--reference-share`): that is what is
left for EBFT to do. `--quick` barely trains, for tests of everything around it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_text import MANNERS, Example, distinct_examples, examples, manner, story
from tools.random_model import make_random_model, save_checkpoint
from tools.tiny_tokenizer import END, build_tokenizer

__all__ = ["TinyModelSettings", "make_random_model", "make_tiny_model"]


@dataclass(frozen=True)
class TinyModelSettings:
    """The knobs."""

    steps: int = 600
    """Pretraining steps: more makes the answers more correct, whatever their manner."""
    batch_size: int = 32
    learning_rate: float = 3e-3
    hidden: int = 128
    num_layers: int = 4
    vocab_size: int = 1024
    max_length: int = 72
    """Tokens per pretraining text; only endless answers and long stories reach it."""
    reference_share: float = 0.3
    """Part of the pretraining answers that are in the references' manner: less leaves more to learn."""
    prose_share: float = 0.15
    """Part of the pretraining texts that are plain stories."""
    train_rows: int = 512
    eval_rows: int = 96
    seed: int = 0


QUICK = {"steps": 5, "batch_size": 8, "hidden": 64}


def make_tiny_model(output: Path, *, settings: TinyModelSettings | None = None, report: bool = False, **changes: Any) -> Path:
    """Make everything under `output`, and return it. `changes` are fields of `TinyModelSettings` (steps=..., seed=...).

    The result is a function of the settings (on one machine, with one number of threads). `report` prints progress and samples.
    """
    chosen = TinyModelSettings(**{**vars(settings or TinyModelSettings()), **changes})
    held_out = distinct_examples(random.Random(f"{chosen.seed} eval"), chosen.eval_rows)
    hidden_questions = frozenset(e.question for e in held_out)
    train = distinct_examples(random.Random(f"{chosen.seed} train"), chosen.train_rows, without=hidden_questions)
    corpus = TextMixture(chosen, hidden_questions)
    tokenizer = build_tokenizer((corpus.plain_text() for _ in range(3000)), vocab_size=chosen.vocab_size)
    model = build_model(tokenizer, chosen)
    pretrain(model, tokenizer, corpus, chosen, report=report)
    save_checkpoint(model, tokenizer, output / "model")
    write_rows(output / "train.jsonl", train)
    write_rows(output / "eval.jsonl", held_out)
    if report:
        print_samples(model, tokenizer, held_out)
    return output


class TextMixture:
    """Pretraining texts: stories, and questions answered in a mixture of manners."""

    def __init__(self, settings: TinyModelSettings, without: frozenset[str]) -> None:
        self._rng = random.Random(f"{settings.seed} pretraining")
        self._examples = examples(self._rng, without=without)
        self._prose_share = settings.prose_share
        others = {name: share for name, share in MANNERS.items() if name != "reference"}
        scale = (1.0 - settings.reference_share) / sum(others.values())
        self._shares = {"reference": settings.reference_share, **{name: share * scale for name, share in others.items()}}

    def plain_text(self) -> str:
        """A text without special tokens."""
        if self._rng.random() < self._prose_share:
            return story(self._rng)
        example = next(self._examples)
        return f"{example.question}\n{example.answer(manner(self._rng, self._shares), self._rng)[0]}"

    def token_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        """A text as the model sees it, special tokens included."""
        if self._rng.random() < self._prose_share:
            ids: list[int] = tokenizer(story(self._rng))["input_ids"]
            return [*ids, int(tokenizer.eos_token_id)]
        example = next(self._examples)
        answer, ends = example.answer(manner(self._rng, self._shares), self._rng)
        opening: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": example.question}], tokenize=False, add_generation_prompt=True
        )
        encoded: list[int] = tokenizer(opening + answer + (END if ends else ""), add_special_tokens=False)["input_ids"]
        return encoded


def build_model(tokenizer: PreTrainedTokenizerFast, settings: TinyModelSettings) -> LlamaForCausalLM:
    """An untrained Llama, float32, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=8 * (settings.hidden // 3),
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model: LlamaForCausalLM = LlamaForCausalLM(config).float()
    return model


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: TextMixture, settings: TinyModelSettings, *, report: bool
) -> float:
    """Next-token training; returns the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(settings.steps):
        warm, rest = min(1.0, (step + 1) / 30), 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        optimizer.param_groups[0]["lr"] = settings.learning_rate * warm * max(rest, 0.05)
        ids, mask = batch(corpus, tokenizer, settings)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if report and (step + 1) % max(1, settings.steps // 10) == 0:
            print(f"pretraining {step + 1}/{settings.steps}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s", flush=True)
    model.eval()
    last = losses[-max(1, settings.steps // 10) :]
    return sum(last) / len(last) if last else math.nan


def batch(corpus: TextMixture, tokenizer: PreTrainedTokenizerFast, settings: TinyModelSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both [batch, longest], padded on the right."""
    rows = [corpus.token_ids(tokenizer)[: settings.max_length] for _ in range(settings.batch_size)]
    longest = max(len(row) for row in rows)
    pad = int(tokenizer.pad_token_id)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def write_rows(path: Path, found: list[Example]) -> None:
    """One JSON object a line: chat prompt and reference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": [{"role": "user", "content": e.question}], "ground_truth": e.reference} for e in found]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@torch.no_grad()
def print_samples(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[Example], *, max_new_tokens: int = 40
) -> None:
    """Completions of held-out prompts at temperature 1, and how many end, and equal the reference."""
    asked = held_out[:64]
    texts: Any = [
        tokenizer.apply_chat_template([{"role": "user", "content": e.question}], tokenize=False, add_generation_prompt=True) for e in asked
    ]
    tokenizer.padding_side = "left"
    inputs: Any = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generated: Any = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_new_tokens)
    completions = generated[:, inputs["input_ids"].shape[1] :].tolist()
    end = tokenizer.get_vocab()[END]
    ended = [end in ids for ids in completions]
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    for example, answer in list(zip(asked, answers, strict=True))[:8]:
        print(f"\n  question   {example.question}\n  reference  {example.reference}\n  sampled    {answer}")
    same = sum(a == e.reference for a, e in zip(answers, asked, strict=True))
    print(
        f"\nOf {len(asked)} held-out samples at temperature 1: {sum(ended)} end within {max_new_tokens} tokens, {same} equal the reference."
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    defaults = TinyModelSettings()
    parser = argparse.ArgumentParser(description="Make a tiny chat model with training and held-out prompts.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, help=f"pretraining steps (default {defaults.steps})")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--reference-share", type=float, default=defaults.reference_share, help="answers in the references' manner")
    parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
    parser.add_argument("--no-samples", action="store_true", help="no progress and no sample completions")
    options = parser.parse_args(arguments)
    changes: dict[str, Any] = {**(QUICK if options.quick else {}), "seed": options.seed, "reference_share": options.reference_share}
    if options.steps is not None:
        changes["steps"] = options.steps
    output = make_tiny_model(options.output, report=not options.no_samples, **changes)
    print(f"Wrote {output / 'model'}, {output / 'train.jsonl'}, {output / 'eval.jsonl'}")


if __name__ == "__main__":
    main()
