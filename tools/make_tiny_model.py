"""Make a tiny chat model from nothing, with training and held-out prompts, in about a minute on a CPU.

    python tools/make_tiny_model.py --output DIR [--steps N] [--seed S] [--quick]

writes DIR/model (Hugging Face format, float32), DIR/train.jsonl and DIR/eval.jsonl. The model is pretrained on the text of
`demo_text.py`: first mostly on answers in the references' manner, until it can copy facts from the question, then on a mixture
in which only a part of the answers have that manner (`--reference-share`): that is what is left for EBFT to do. `--quick` barely
trains, for tests of everything around it.
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

from tools.demo_text import Example, distinct_examples, examples, manner, story
from tools.random_model import make_random_model, save_checkpoint
from tools.tiny_tokenizer import ASSISTANT, BOS, END, EOS, USER, build_tokenizer

__all__ = ["TinyModelSettings", "make_random_model", "make_tiny_model"]


@dataclass(frozen=True)
class TinyModelSettings:
    """The knobs."""

    steps: int = 440
    """Pretraining steps: more makes the answers more correct, whatever their manner."""
    mixture_from: float = 0.5
    """Part of the steps that is spent on `early_reference_share` first."""
    early_reference_share: float = 0.85
    batch_size: int = 32
    learning_rate: float = 5e-3
    hidden: int = 64
    num_layers: int = 4
    num_heads: int = 4
    """Of hidden / num_heads dimensions; vLLM on the CPU knows none below 32."""
    vocab_size: int = 1024
    max_length: int = 64
    """Tokens per pretraining text; only endless answers and long stories reach it."""
    reference_share: float = 0.3
    """Part of the pretraining answers that are in the references' manner: less leaves more to learn."""
    prose_share: float = 0.1
    """Part of the pretraining texts that are plain stories."""
    train_rows: int = 512
    eval_rows: int = 96
    seed: int = 0


QUICK = {"steps": 5, "batch_size": 8}


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

    def plain_text(self) -> str:
        """A text without special tokens, for the tokenizer."""
        example = next(self._examples)
        return f"{story(self._rng)}\n{example.question}\n{example.answer(manner(self._rng, 0.5), self._rng)[0]}"

    def opening_and_continuation(self, *, reference_share: float, prose_share: float) -> tuple[str, str]:
        """Special tokens included; for a story the opening is BOS alone."""
        if self._rng.random() < prose_share:
            return BOS, story(self._rng) + EOS
        example = next(self._examples)
        answer, ends = example.answer(manner(self._rng, reference_share), self._rng)
        return f"{BOS}{USER}{example.question}{END}\n{ASSISTANT}", answer + (END if ends else "")


def build_model(tokenizer: PreTrainedTokenizerFast, settings: TinyModelSettings) -> LlamaForCausalLM:
    """An untrained Llama, float32, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=512,
        initializer_range=0.05,  # the usual 0.02 is made for wide models: copying is learnt far later with it
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
        progress = step / settings.steps
        decay = 1.0 if progress < settings.mixture_from else (1.0 - progress) / (1.0 - settings.mixture_from)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * min(1.0, (step + 1) / 30) * max(decay, 0.05)
        early = progress < settings.mixture_from
        share = settings.early_reference_share if early else settings.reference_share
        ids, labels = batch(corpus, tokenizer, settings, reference_share=share)
        loss = model(input_ids=ids, labels=labels).loss
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


def batch(
    corpus: TextMixture, tokenizer: PreTrainedTokenizerFast, settings: TinyModelSettings, *, reference_share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both [batch, longest], padded on the right.

    Only answers are learnt: the questions are random, and their loss would drown the copying that is to be learnt.
    """
    texts = [
        corpus.opening_and_continuation(reference_share=reference_share, prose_share=settings.prose_share)
        for _ in range(settings.batch_size)
    ]
    openings, answers = zip(*texts, strict=True)
    heads: list[list[int]] = tokenizer(list(openings), add_special_tokens=False)["input_ids"]
    tails: list[list[int]] = tokenizer(list(answers), add_special_tokens=False)["input_ids"]
    rows = [(head + tail)[: settings.max_length] for head, tail in zip(heads, tails, strict=True)]
    longest = max(len(row) for row in rows)
    pad = int(tokenizer.pad_token_id)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    labels = torch.tensor([[-100] * len(h) + row[len(h) :] + [-100] * (longest - len(row)) for h, row in zip(heads, rows, strict=True)])
    return ids, labels


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
    parser.add_argument("--mixture-from", type=float, default=defaults.mixture_from, help="part of the steps before the mixture")
    parser.add_argument("--reference-share", type=float, default=defaults.reference_share, help="answers in the references' manner")
    parser.add_argument("--num-heads", type=int, default=defaults.num_heads, help="attention heads; 2 for vLLM on the CPU")
    parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
    parser.add_argument("--no-samples", action="store_true", help="no progress and no sample completions")
    options = parser.parse_args(arguments)
    changes: dict[str, Any] = {
        **(QUICK if options.quick else {}),
        "seed": options.seed,
        "reference_share": options.reference_share,
        "mixture_from": options.mixture_from,
        "num_heads": options.num_heads,
    }
    if options.steps is not None:
        changes["steps"] = options.steps
    output = make_tiny_model(options.output, report=not options.no_samples, **changes)
    print(f"Wrote {output / 'model'}, {output / 'train.jsonl'}, {output / 'eval.jsonl'}")


if __name__ == "__main__":
    main()
