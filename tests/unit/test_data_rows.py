"""What a row must look like."""

from __future__ import annotations

from typing import Any

import pytest

from ebft_ds.data.file_rows import UnreadableRow
from ebft_ds.data.rows import BadRow, ValidRow, validate_row


def validate(row: Any) -> ValidRow:
    return validate_row(row, prompt_field="prompt", ground_truth_field="ground_truth")


def test_string_and_chat_prompts() -> None:
    assert validate({"prompt": "Hi", "ground_truth": " there"}) == ValidRow("Hi", " there")
    row = validate({"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": "there"})
    assert row.is_chat
    assert row.prompt == [{"role": "user", "content": "Hi"}]


def test_sharegpt_messages_become_role_and_content() -> None:
    turns = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]
    row = validate({"prompt": [*turns, {"from": "human", "value": "Well"}], "ground_truth": "x"})
    assert [m["role"] for m in row.prompt if isinstance(m, dict)] == ["system", "user", "assistant", "user"]
    assert isinstance(row.prompt[3], dict)
    assert row.prompt[3]["content"] == "Well"


def test_null_fields_from_arrow_are_dropped_and_others_kept() -> None:
    row = validate({"prompt": [{"role": "user", "content": "Hi", "tool_calls": None, "name": "Ada"}], "ground_truth": "x"})
    assert row.prompt == [{"role": "user", "content": "Hi", "name": "Ada"}]


def test_remaining_turns_is_noticed_not_refused() -> None:
    assert validate({"prompt": "a", "ground_truth": "b", "remaining_turns": [{"role": "user", "content": "c"}]}).has_remaining_turns
    assert not validate({"prompt": "a", "ground_truth": "b", "remaining_turns": []}).has_remaining_turns


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, "no ground_truth: its fields are prompt, answer .*ground_truth_field"),
        ({"text": "a", "ground_truth": "b"}, "no prompt: its fields are text, ground_truth .*prompt_field"),
        ({"prompt": "a", "ground_truth": None}, "ground_truth null"),
        ({"prompt": "a", "ground_truth": "  \n"}, "empty ground_truth"),
        ({"prompt": "a", "ground_truth": 3}, "ground_truth that is a int"),
        ({"prompt": "a", "ground_truth": ["b"]}, "ground_truth that is a list"),
        ({"prompt": " ", "ground_truth": "b"}, "empty prompt"),
        ({"prompt": 1.5, "ground_truth": "b"}, "prompt that is a float; it must be a string or a list of chat messages"),
        ({"prompt": [], "ground_truth": "b"}, "prompt without messages"),
        ({"prompt": ["hi"], "ground_truth": "b"}, "str as message 1 of prompt"),
        ({"prompt": [{"role": "robot", "content": "x"}], "ground_truth": "b"}, "unknown role 'robot' in message 1"),
        ({"prompt": [{"from": "robot", "value": "x"}], "ground_truth": "b"}, "unknown role 'robot' in message 1"),
        ({"prompt": [{"content": "x"}], "ground_truth": "b"}, "no role in message 1 of prompt: its fields are content"),
        ({"prompt": [{"role": "user", "content": [1]}], "ground_truth": "b"}, "content that is a list in message 1"),
        ({"prompt": [{"role": "user"}], "ground_truth": "b"}, "content that is a null"),
        ({"prompt": [{"role": "user", "content": " "}], "ground_truth": "b"}, "last message is empty"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "ground_truth": "b"},
            "ends with an assistant",
        ),
        ([1, 2], "is a list, not an object"),
        (UnreadableRow("line 3 is not valid JSON"), "line 3 is not valid JSON"),
    ],
)
def test_bad_rows_say_why(row: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        validate(row)
