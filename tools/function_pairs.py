"""Preference pairs of function bodies: the real one against another function's, or against itself with a small mistake.

    python tools/function_pairs.py --rows FUNCTIONS.jsonl --output DIR [--held-out N] [--seed S]

reads rows with `prompt` (the question for a function's body) and `ground_truth` (the body) and writes DIR/train.jsonl and DIR/eval.jsonl
with `prompt`, `chosen`, `rejected` and `subset` (`other body`, or `mistake`). Other bodies come from the same file, and no held-out prompt
occurs in training.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

_CHANGES: tuple[tuple[str, str], ...] = (
    (r"\bTrue\b", "False"), (r"\bFalse\b", "True"), (r"\bNone\b", "self"), (r" == ", " != "), (r" != ", " == "), (r" is not ", " is "),
    (r" < ", " >= "), (r" > ", " <= "), (r" \+ ", " - "), (r" - ", " + "), (r"\bnot in\b", "in"), (r"\bif not\b", "if"), (r"\band\b", "or"),
    (r"\bor\b", "and"), (r"\b0\b", "1"), (r"\b1\b", "2"), (r"\breturn\b", "yield"), (r"\bself\.", "cls."), (r"\bmax\b", "min"),
    (r"\.append\(", ".remove("), (r"\bstr\(", "int("), (r"\blen\(", "sum("),
)  # fmt: skip


def with_a_mistake(body: str, rng: random.Random) -> str | None:
    """The body with one place changed; None where no change applies."""
    places = [(match.start(), match.end(), new) for old, new in _CHANGES for match in re.finditer(old, body)]
    if not places:
        return None
    start, end, new = rng.choice(places)
    return body[:start] + new + body[end:]


def function_pairs(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """One pair a row: every second one with a mistake where the body allows it. Other bodies are of about the same length.

    ValueError: a body without another one in the rows.
    """
    by_length = sorted({row["ground_truth"] for row in rows}, key=len)
    place = {body: i for i, body in enumerate(by_length)}
    pairs = []
    for number, row in enumerate(rows):
        body = row["ground_truth"]
        wrong, subset = (with_a_mistake(body, rng) if number % 2 else None), "mistake"
        if wrong is None:
            near = [by_length[i] for i in range(max(0, place[body] - 10), min(len(by_length), place[body] + 11)) if i != place[body]]
            if not near:
                raise ValueError(f"{len(rows)} row(s) hold a single distinct body, so there is no other one: add rows, or lower --held-out")
            wrong, subset = rng.choice(near), "other body"
        pairs.append({"prompt": row["prompt"], "chosen": body, "rejected": wrong, "subset": subset})
    return pairs


def make_function_pairs(source: Path, output: Path, *, held_out: int, seed: int) -> Path:
    """Write both files under `output`, and return it."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rng = random.Random(f"{seed} function pairs")
    rng.shuffle(rows)
    evaluation = rows[:held_out]
    asked = {json.dumps(row["prompt"]) for row in evaluation}
    train = [row for row in rows[held_out:] if json.dumps(row["prompt"]) not in asked]
    output.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("eval", evaluation)):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in function_pairs(part, rng)), encoding="utf-8")
    return output


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Preference pairs of function bodies.")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL with prompt and ground_truth")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--held-out", type=int, default=200, help="rows of eval.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        output = make_function_pairs(options.rows, options.output, held_out=options.held_out, seed=options.seed)
    except ValueError as error:
        parser.error(str(error))
    print(f"Wrote {output / 'train.jsonl'}, {output / 'eval.jsonl'}")


if __name__ == "__main__":
    main()
