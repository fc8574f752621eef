"""Settings and models that several tests share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch or DeepSpeed load: several ranks share few cores, and no test may touch a GPU or a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("ebft", deadline=None, print_blob=True)
settings.load_profile("ebft")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random four-layer Llama with tied embeddings, tokenizer and chat template."""
    from tools.random_model import make_random_model

    return make_random_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training (48 rows) and held-out (6 rows) files of chat prompts with references."""
    import random

    from tools.demo_text import distinct_examples

    folder = tmp_path_factory.mktemp("tiny_data")
    examples = distinct_examples(random.Random(5), 54)
    rows = [{"prompt": [{"role": "user", "content": e.question}], "ground_truth": e.reference} for e in examples]
    files = (folder / "train.jsonl", folder / "eval.jsonl")
    for path, part in zip(files, (rows[:48], rows[48:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return files
