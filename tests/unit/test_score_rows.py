"""Rows to be scored: their forms, their token ids, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ebft_ds.data.preference import RewardEncoder, RewardEncoding
from ebft_ds.data.rows import BadRow
from ebft_ds.errors import ModelError
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.score import wanted_scale
from ebft_ds.trainers.score_job import ScoreJob, ScoreServer
from ebft_ds.trainers.score_rounds import GroupIds
from ebft_ds.trainers.score_rows import ScoreEncoder, measured_scale, read_score_row

ENCODING = RewardEncoding(max_length=64)
USER, ANSWER, OTHER = ({"role": role, "content": text} for role, text in (("user", "who?"), ("assistant", "Ada."), ("assistant", "Bob.")))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model)
    return loaded


def sequences(groups: list[GroupIds]) -> list[list[int]]:
    return [[*group.prefix, *branch] for group in groups for branch in group.branches]


def encoder(tokenizer: PreTrainedTokenizerBase, encoding: RewardEncoding = ENCODING, token_budget: int = 1000) -> ScoreEncoder:
    return ScoreEncoder(tokenizer, encoding, style="shared", token_budget=token_budget)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "a b", "response": " c d"}, [("a b", " c d")]),
        ({"response": "alone"}, [(None, "alone")]),
        ({"prompt": "a b", "responses": [" c"]}, [("a b", " c")]),
        ({"prompt": "a b", "responses": [" c", " d", " e f"]}, [("a b", " c"), ("a b", " d"), ("a b", " e f")]),
        ({"prompt": "a b", "chosen": " c", "rejected": " d"}, [("a b", " c"), ("a b", " d")]),
        ({"prompt": "a b", "chosen": " same", "rejected": " same"}, [("a b", " same"), ("a b", " same")]),
        ({"prompt": "a b", "response": ""}, [("a b", "")]),
        ({"messages": [USER, ANSWER]}, [([USER], [ANSWER])]),
        ({"prompt": [USER], "response": [ANSWER]}, [([USER], [ANSWER])]),
        ({"prompt": [USER], "response": "Ada."}, [([USER], [ANSWER])]),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, [([USER], [ANSWER]), ([USER], [OTHER])]),
        ({"prompt": "a", "response": " b", "margin": 1.0, "id": 7, "tools": None}, [("a", " b")]),
    ],
)
def test_every_form_gets_the_ids_of_training(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], parts: list[tuple[Any, Any]]) -> None:
    one = RewardEncoder(tokenizer, ENCODING)
    assert sequences(encoder(tokenizer).encode(row)) == [one.encode_one(prompt, response) for prompt, response in parts]


def test_responses_share_a_forward_unless_that_is_too_long_for_the_budget(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "one two three four five", "responses": [" a b", " c", " d e f"]}
    together, apart = encoder(tokenizer).encode(row), encoder(tokenizer, token_budget=64).encode(row)
    assert len(together) == 1
    tight = encoder(tokenizer, token_budget=max(map(len, sequences(apart)))).encode(row)
    assert len(tight) == 3
    assert sequences(tight) == sequences(together)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (5, "not an object"),
        ({}, "has no chosen"),
        ({"prompt": "a"}, "has no chosen: its fields are prompt"),
        ({"prompt": "a", "response": 3}, "has a response that is"),
        ({"prompt": "a", "response": " b", "chosen": "c", "rejected": "d"}, "has response and chosen and rejected"),
        ({"messages": [USER, ANSWER], "response": "b"}, "has messages and response"),
        ({"messages": [USER, ANSWER], "prompt": "b"}, "has a prompt beside messages"),
        ({"messages": "hello"}, "has messages that are no list"),
        ({"messages": [USER]}, "ends with a user message"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "unknown role"),
        ({"prompt": "a", "responses": []}, "responses that are"),
        ({"prompt": "a", "chosen": "b"}, "has no rejected"),
    ],
)
def test_bad_rows_say_what_is_wrong(row: Any, text: str) -> None:
    with pytest.raises(BadRow, match=text):
        read_score_row(row)


def test_a_row_over_the_length_is_bad_where_nothing_may_be_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "word " * 50, "response": "end"}
    with pytest.raises(BadRow, match="too long"):
        encoder(tokenizer, RewardEncoding(max_length=8, truncation_mode="drop")).encode(row)
    [ids] = sequences(encoder(tokenizer, RewardEncoding(max_length=8)).encode(row))
    assert len(ids) == 8


def test_the_scale_needs_measured_rewards() -> None:
    assert measured_scale(RewardEncoding(max_length=8, mean=1.0, std=4.0)).normalized(3.0) == 0.5
    for mean, std in ((None, None), (1.0, None), (1.0, 0.0)):
        with pytest.raises(ModelError, match="no mean and std"):
            measured_scale(RewardEncoding(max_length=8, mean=mean, std=std))


def test_normalised_scores_are_asked_for_by_command_or_model(caplog: pytest.LogCaptureFixture) -> None:
    job = ScoreJob(work=ScoreServer(), model="m", dtype="float32")
    asked = ScoreJob(work=ScoreServer(), model="m", dtype="float32", normalize=True)
    measured = RewardEncoding(max_length=8, mean=1.0, std=4.0)
    assert wanted_scale(job, measured) is None
    assert wanted_scale(asked, measured) == RewardScale(1.0, 4.0)
    assert wanted_scale(job, RewardEncoding(max_length=8, mean=1.0, std=4.0, normalize=True)) == RewardScale(1.0, 4.0)
    assert wanted_scale(job, RewardEncoding(max_length=8, normalize=True)) is None
    assert "scores are raw only" in caplog.text
    with pytest.raises(ModelError):
        wanted_scale(asked, ENCODING)
