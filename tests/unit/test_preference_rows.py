"""What a preference row may look like, and what is said about one that cannot be used."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest

from ebft_ds.config.sections import DataSection, RewardSection
from ebft_ds.data.file_rows import UnreadableRow
from ebft_ds.data.preference import PreferenceFields, PreferenceRow, validate_preference_row
from ebft_ds.data.rows import BadRow

FIELDS = PreferenceFields()
Q, GOOD, BAD = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
SYSTEM = {"role": "system", "content": "Be brief."}


def valid(row: Any, fields: PreferenceFields = FIELDS) -> PreferenceRow:
    return validate_preference_row(row, fields)


CHAT = PreferenceRow([Q], [[GOOD], [BAD]])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [Q], "chosen": "good", "rejected": "bad"},
        {"prompt": [Q], "chosen": GOOD, "rejected": BAD},
        {"prompt": "Q", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Q", "chosen": [Q, GOOD], "rejected": [Q, BAD]},
        {"prompt": [Q], "chosen": [Q, GOOD], "rejected": [Q, BAD]},
        {"prompt": [Q], "chosen": [Q, GOOD], "rejected": [BAD]},
        {"chosen": [Q, GOOD], "rejected": [Q, BAD]},
        {"prompt": None, "chosen": [Q, GOOD], "rejected": [Q, BAD], "margin": None, "tools": None},
        {"responses": [[Q, GOOD], [Q, BAD]]},
        {"prompt": [Q], "responses": ["good", "bad"]},
        {"prompt": [{"from": "human", "value": "Q"}], "chosen": [{"from": "gpt", "value": "good"}], "rejected": "bad"},
        {
            "chosen": {"role": ["user", "assistant"], "content": ["Q", "good"]},
            "rejected": {"from": ["human", "gpt"], "value": ["Q", "bad"]},
        },
        {"prompt": b"Q", "chosen": {"role": np.array([b"assistant"], object), "content": np.array([b"good"], object)}, "rejected": [BAD]},
    ],
)
def test_one_chat_in_all_its_forms(row: dict[str, Any]) -> None:
    assert valid(row) == CHAT


def test_texts_with_and_without_a_prompt() -> None:
    assert valid({"prompt": "Q: ", "chosen": "good", "rejected": "bad"}) == PreferenceRow("Q: ", ["good", "bad"])
    assert valid({"chosen": "Q: good", "rejected": "Q: bad"}) == PreferenceRow(None, ["Q: good", "Q: bad"])
    assert valid({"prompt": "", "chosen": "good", "rejected": ""}) == PreferenceRow(None, ["good", ""])


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("other question", [{"role": "user", "content": "other question"}, Q]),
        ([SYSTEM], [SYSTEM, Q]),
        ([SYSTEM, Q], [SYSTEM, Q]),
        ("Be brief.", [{"role": "user", "content": "Be brief."}, Q]),
    ],
)
def test_a_prompt_is_never_lost(prompt: Any, before: list[Any]) -> None:
    """What the conversations do not hold themselves is put before them."""
    row = {"prompt": prompt, "chosen": [Q, GOOD], "rejected": [Q, BAD]}
    if prompt == [SYSTEM, Q]:
        row = {"prompt": prompt, "chosen": [SYSTEM, Q, GOOD], "rejected": [SYSTEM, Q, BAD]}
    assert valid(row) == PreferenceRow(before, [[GOOD], [BAD]])


def test_a_prompt_within_the_conversation_is_not_doubled() -> None:
    row = {"prompt": "Q", "chosen": [SYSTEM, Q, GOOD], "rejected": [SYSTEM, Q, BAD]}
    assert valid(row) == PreferenceRow([SYSTEM, Q], [[GOOD], [BAD]])


def test_a_repeated_question_in_the_answer_is_kept() -> None:
    """The answer goes on for several turns and asks the prompt's question again: that is no copy of the prompt."""
    row = {"prompt": [Q], "chosen": [BAD, Q, GOOD], "rejected": [BAD]}
    assert valid(row) == PreferenceRow([Q], [[BAD, Q, GOOD], [BAD]])


def test_conversations_that_differ_early_share_what_they_share() -> None:
    other = {"role": "user", "content": "another"}
    row = valid({"chosen": [SYSTEM, Q, GOOD], "rejected": [SYSTEM, other, GOOD]})
    assert row == PreferenceRow([SYSTEM], [[Q, GOOD], [other, GOOD]])
    assert valid({"chosen": [Q, GOOD], "rejected": [Q, GOOD]}) == PreferenceRow([Q], [[GOOD], [GOOD]])


def test_ranked_responses() -> None:
    assert valid({"prompt": "Q", "responses": ["a", "b", "c"]}).responses == ["a", "b", "c"]


def test_numbers_subset_and_renamed_fields() -> None:
    fields = PreferenceFields.of(
        RewardSection(chosen_field="win", rejected_field="lose", margin_field="gap"), DataSection(prompt_field="x")
    )
    row = valid({"x": "Q", "win": "a", "lose": "b", "gap": np.float32(1.5), "preference": 0.5, "subset": b"math", "chosen": 3}, fields)
    assert row == PreferenceRow("Q", ["a", "b"], margin=1.5, preference=0.5, subset="math")


def test_tools_as_a_list_or_as_json_and_without_arrows_nulls() -> None:
    tools = [{"name": "f", "parameters": {"x": {"type": "int"}}}, {"name": "g", "parameters": {"y": {"type": "str"}}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "g", "arguments": {"y": "1"}}]}
    rows = [{"prompt": [Q], "chosen": [call], "rejected": [BAD], "tools": tools}]
    row = valid(datasets.Dataset.from_list(rows)[0])
    assert row.tools == tools
    assert row.responses[0] == [{"role": "assistant", "content": "", "tool_calls": call["tool_calls"]}]
    assert valid({**rows[0], "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]
    assert valid({"chosen": "a", "rejected": "b", "tools": []}).tools is None


@pytest.mark.parametrize("pad", [0, 2])
def test_tokenised_columns_are_taken_by_their_masks(pad: int) -> None:
    row = {
        "input_ids_chosen": [pad, pad, 5, 6, 2],
        "attention_mask_chosen": [0, 0, 1, 1, 1],
        "input_ids_rejected": np.array([5, 7, 2, pad]),
        "attention_mask_rejected": np.array([True, True, True, False]),
        "margin": 1,
    }
    assert valid(row) == PreferenceRow(None, [], margin=1.0, token_ids=[[5, 6, 2], [5, 7, 2]])
    assert valid({"chosen_ids": [5, 2], "rejected_ids": (6, 2)}).token_ids == [[5, 2], [6, 2]]


MASK = {"input_ids_rejected": [1], "attention_mask_rejected": [1]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (UnreadableRow("line 3 is not valid JSON"), "line 3"),
        ([1], "is a list, not an object"),
        ({"prompt": "Q", "chosen": "a"}, "has no rejected: its fields are prompt, chosen"),
        ({"chosen": "a", "rejected": None}, "has rejected null"),
        ({"chosen": "a", "rejected": 3}, "rejected that is a int"),
        ({"chosen": [], "rejected": [GOOD]}, "chosen without messages"),
        ({"chosen": "a", "rejected": [Q, BAD]}, "chosen that is a string beside"),
        ({"chosen": [Q, GOOD], "rejected": [Q]}, "rejected that ends with a user message"),
        ({"prompt": [Q, GOOD, Q], "chosen": [Q, GOOD, Q], "rejected": "b"}, "chosen that ends with a user message"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt that is a int"),
        ({"chosen": "a", "rejected": "b", "responses": ["a", "b"]}, "both responses and chosen and rejected"),
        ({"responses": ["a"]}, "responses that are 1 of them"),
        ({"responses": "ab"}, "responses that are a str"),
        ({"chosen": "a", "rejected": "b", "margin": "x"}, "margin that is a str"),
        ({"chosen": "a", "rejected": "b", "margin": float("nan")}, "margin that is nan"),
        ({"chosen": "a", "rejected": "b", "preference": 1.5}, "preference of 1.5"),
        ({"chosen": "a", "rejected": "b", "tools": [{"name": "f"}]}, "tools, but its texts"),
        ({"prompt": [Q], "chosen": "a", "rejected": "b", "tools": "{"}, "tools that are no JSON"),
        ({"prompt": [Q], "chosen": "a", "rejected": "b", "tools": 3}, "tools that are a int"),
        ({"chosen": b"\xff", "rejected": "b"}, "not UTF-8"),
        ({"chosen": {"role": ["user"], "content": []}, "rejected": "b"}, "lists differ in length"),
        ({"chosen_ids": [1]}, "chosen_ids, but no rejected_ids"),
        ({"chosen_ids": [], "rejected_ids": [1]}, "without any token"),
        ({"chosen_ids": [1.5], "rejected_ids": [1]}, "list of integers"),
        ({"input_ids_chosen": [1, 2], "attention_mask_chosen": [1], **MASK}, "2 input_ids_chosen, but 1 values"),
        ({"input_ids_chosen": [1, 2], "attention_mask_chosen": [0, 0], **MASK}, "without any token"),
    ],
)
def test_bad_rows_are_named(row: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        valid(row)


@pytest.mark.parametrize("extra", [{"margin": 0.5}, {"preference": 0.8}])
def test_margin_and_preference_are_of_a_pair(extra: dict[str, float]) -> None:
    with pytest.raises(BadRow, match=r"beside 3 responses; it is of a pair"):
        validate_preference_row({"responses": ["a", "b", "c"], **extra}, PreferenceFields())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"input_ids_chosen": [5, 6, 0], "attention_mask_chosen": [1, 1, 0], "input_ids_rejected": [5, 7, 0]},
            "input_ids_rejected without",
        ),
        (
            {"input_ids_chosen": [5], "attention_mask_chosen": [2], "input_ids_rejected": [5], "attention_mask_rejected": [1]},
            "other than 0 and 1",
        ),
        ({"chosen": "a", "rejected": "b", "margin": 10**400}, "too large"),
    ],
)
def test_rows_that_would_be_read_wrongly_are_bad(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow, match=said):
        validate_preference_row(row, PreferenceFields())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "a\ud800", "rejected": "b"}, "half a surrogate pair"),
        (
            {"chosen": [{"role": "assistant", "content": "\udfff"}], "rejected": [{"role": "assistant", "content": "b"}]},
            "half a surrogate pair",
        ),
        ({"chosen_ids": [5, 2**70], "rejected_ids": [5]}, "more than 64 bits"),
        ({"chosen": "a", "rejected": "b", "preference": 2**70}, "more than 64 bits"),
        ({"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b", "tools": "[" * 5000}, "no JSON"),
        ({"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b", "tools": f"[{'9' * 5000}]"}, "no JSON"),
    ],
)
def test_what_json_can_spell_and_nothing_else_can_hold_is_bad(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow, match=said):
        validate_preference_row(row, PreferenceFields())
