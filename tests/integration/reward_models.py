"""A reward model with random weights, and what transformers itself says its scores are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ebft_ds.data.preference import RewardEncoder, RewardEncoding
from tools.random_model import make_random_model

MAX_LENGTH = 96


def make_reward_model(folder: Path, **settings: Any) -> Path:
    """Its weights are large enough that scores differ clearly. `settings`: of make_random_model."""
    make_random_model(folder, **({"num_layers": 2, "initializer_range": 0.15} | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    RewardEncoding(max_length=MAX_LENGTH, mean=0.5, std=2.0).save(folder)
    return folder


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts and chats, one to three responses; some are over the length."""
    source = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(
            source.choice(["the", "cat", "sat", "on", "a", "mat", "and", "Ada", "slept", "why?"]) for _ in range(source.randint(1, most))
        )

    found: list[dict[str, Any]] = []
    for number in range(count):
        prompt, answers = words(12), [words(9) for _ in range(3)]
        user = {"role": "user", "content": prompt}
        found.append(
            [
                {"prompt": prompt, "response": " " + answers[0]},
                {"prompt": prompt, "chosen": " " + answers[0], "rejected": " " + answers[1]},
                {"prompt": prompt, "responses": [" " + answer for answer in answers]},
                {"messages": [user, {"role": "assistant", "content": answers[0]}]},
                {"prompt": [user], "chosen": answers[0], "rejected": answers[1]},
                {"prompt": words(200), "response": " " + answers[0]},
            ][number % 6]
        )
    return found


def responses(row: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(prompt, response) of each response."""
    if "messages" in row:
        return [(row["messages"][:-1], row["messages"][-1:])]
    names = [name for name in ("response", "chosen", "rejected") if name in row]
    texts = [row[name] for name in names] or row["responses"]
    return [(row["prompt"], text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]) for text in texts]


def token_ids(model: Path, found: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Of every row's responses, each encoded by itself."""
    encoder = RewardEncoder(AutoTokenizer.from_pretrained(model), RewardEncoding.load(model))
    return [[encoder.encode_one(prompt, response) for prompt, response in responses(row)] for row in found]


@torch.no_grad()
def scores_of_transformers(model: Path, sequences: list[list[list[int]]]) -> list[list[float]]:
    """One sequence at a time, without padding."""
    loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    return [[float(loaded(torch.tensor([ids])).logits[0, 0]) for ids in row] for row in sequences]
