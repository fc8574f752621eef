"""Make a preference task from nothing: a reward model must look from each response back into its prompt to get it right.

    python tools/preference_task.py --output DIR [--rows N] [--seed S]

writes DIR/model (an untrained Llama, Hugging Face format, float32), DIR/train.jsonl and DIR/eval.jsonl. A prompt lists some things; the
chosen response names only things of the list, the rejected one also something that is not in it. Taken alone no response is better than
another one: every word is as frequent in chosen as in rejected responses. No held-out list occurs in training.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.random_model import make_random_model
from tools.tiny_tokenizer import build_tokenizer

THINGS = (
    "apple", "bell", "brush", "cable", "candle", "chair", "clock", "coin", "cup", "drum", "flute", "fork", "glove", "hammer", "hat",
    "jar", "kite", "knife", "lamp", "mirror",
)  # fmt: skip
LISTED, NAMED = 5, 3
"""Things in a prompt; things in a response."""


def preference_rows(count: int, rng: random.Random, without: frozenset[frozenset[str]] = frozenset()) -> list[dict[str, Any]]:
    """Rows with `prompt`, `chosen`, `rejected` and `subset` (the place of the thing that is not in the list)."""
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        listed = rng.sample(THINGS, LISTED)
        if frozenset(listed) in without:
            continue
        named = rng.sample(listed, NAMED)
        wrong, place = list(named), rng.randrange(NAMED)
        wrong[place] = rng.choice([thing for thing in THINGS if thing not in listed])
        rows.append(
            {"prompt": f"list: {' '.join(listed)} ;", "chosen": _said(named), "rejected": _said(wrong), "subset": f"word {place + 1}"}
        )
    return rows


def _said(things: list[str]) -> str:
    return f" named: {' '.join(things)}"


def listed_in(row: dict[str, Any]) -> frozenset[str]:
    """The things of a row's list."""
    return frozenset(row["prompt"].split()[1:-1])


def make_preference_task(output: Path, *, rows: int = 4096, held_out: int = 256, seed: int = 0) -> Path:
    """Make everything under `output`, and return it: a function of the arguments."""
    evaluation = preference_rows(held_out, random.Random(f"{seed} held out"))
    train = preference_rows(rows, random.Random(f"{seed} train"), frozenset(map(listed_in, evaluation)))
    texts = [row["prompt"] + row[side] for row in train[:500] for side in ("chosen", "rejected")]
    tokenizer = build_tokenizer(texts, vocab_size=400)
    make_random_model(
        output / "model", num_layers=2, hidden=64, num_heads=4, num_kv_heads=4, tokenizer=tokenizer, initializer_range=0.08, seed=seed
    )
    for name, found in (("train", train), ("eval", evaluation)):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return output


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make a synthetic preference task with an untrained model.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--rows", type=int, default=4096, help="training rows")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    output = make_preference_task(options.output, rows=options.rows, seed=options.seed)
    print(f"Wrote {output / 'model'}, {output / 'train.jsonl'}, {output / 'eval.jsonl'}")


if __name__ == "__main__":
    main()
