"""From a source to a tokenised dataset: counts, limits, held-out rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.config.sections import DataSection, RolloutSection
from ebft_ds.data import PromptDataset, check_vocabulary, eval_prompts, load_prompt_dataset, load_train_and_eval
from ebft_ds.errors import ConfigError, DataError, ModelError
from tests.unit.small_tokenizers import byte_level, chatml, user

ROLLOUT = RolloutSection(max_completion_length=32)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": user(f"question number {i}"), "ground_truth": f"answer {i}"} for i in range(count)]


def load(source: Any, tokenizer: Any = None, **fields: Any) -> PromptDataset:
    data = DataSection(**{"max_seq_length": 128, **fields})
    return load_prompt_dataset(data, ROLLOUT, tokenizer or chatml(), source=source, split="train")


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_rows_come_out_in_order_with_ids_and_display(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "prompts.jsonl", rows(5)))
    assert len(dataset) == 5
    row = dataset[3]
    assert row.prompt_id == 3
    assert row.prompt == user("question number 3")
    assert row.reference == "answer 3"
    assert chatml().decode(row.token_ids) == "<|im_start|>user\nquestion number 3<|im_end|>\n<|im_start|>assistant\n"
    assert chatml().decode(row.reference_ids) == "answer 3<|im_end|>"
    assert dataset.is_chat
    assert dataset.max_token_id == max(t for i in range(5) for t in dataset[i].token_ids + dataset[i].reference_ids)


def test_renamed_fields() -> None:
    dataset = load([{"q": "Hello", "a": " there"}], byte_level(), prompt_field="q", ground_truth_field="a")
    assert dataset[0].reference == " there"
    assert not dataset.is_chat


def test_row_without_ground_truth_names_file_and_row(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", [*rows(16), {"prompt": "x", "answer": "y"}])
    with pytest.raises(DataError, match=r"row 17 of prompts.jsonl has no ground_truth: its fields are prompt, answer") as error:
        load(path)
    assert error.value.exit_code == 3


def test_bad_json_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", [rows(1)[0], "{broken"])
    with pytest.raises(DataError, match=r"row 2 of prompts.jsonl line 2 is not valid JSON"):
        load(path)


def test_bad_rows_skip_counts_and_keeps_row_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = rows(4)
    lines = [good[0], {"prompt": "x"}, "{broken", good[1], {"prompt": user("q"), "ground_truth": ""}, good[2], [1], good[3]]
    with caplog.at_level(logging.INFO, logger="ebft_ds"):
        dataset = load(write(tmp_path / "prompts.jsonl", lines), bad_rows="skip")
    assert [dataset[i].prompt_id for i in range(len(dataset))] == [0, 3, 5, 7]
    assert dataset.report.bad_rows == 4
    assert dataset.report.first_bad is not None
    assert "row 2 of prompts.jsonl has no ground_truth" in dataset.report.first_bad
    assert "4 of 8 rows usable; 4 bad, skipped" in caplog.text
    assert dataset.where(1) == "row 4 of prompts.jsonl"


def test_no_usable_row_is_an_error_even_when_skipping() -> None:
    with pytest.raises(DataError, match=r"No usable row.*2 bad"):
        load([{"prompt": "x"}, {"prompt": "y"}], bad_rows="skip")
    with pytest.raises(DataError, match=r"No usable row.*over-long"):
        load(rows(3), max_prompt_length=2)


def test_chat_rows_without_a_template_say_what_to_do() -> None:
    for bad_rows in ("error", "skip"):
        with pytest.raises(DataError, match=r"row 1 of .* is a chat prompt, but .* has no chat template. Set chat_template"):
            load(rows(2), byte_level(), bad_rows=bad_rows)
    assert len(load(rows(2), byte_level(), chat_template="{% for m in messages %}{{ m.content }}</s>{% endfor %}")) == 2


def test_overlong_rows_are_dropped_whole_and_counted() -> None:
    tokenizer = byte_level()
    long_prompt = {"prompt": "Hello there, how are you today? " * 8, "ground_truth": "x"}
    long_reference = {"prompt": "Hi", "ground_truth": "Hello there, how are you today? " * 8}
    short = {"prompt": "Hi", "ground_truth": "Hello"}
    dataset = load([short, long_prompt, long_reference, short], tokenizer, max_seq_length=60, max_prompt_length=40)
    assert [dataset[i].prompt_id for i in range(len(dataset))] == [0, 3]
    assert (dataset.report.overlong_prompts, dataset.report.overlong_references) == (1, 1)
    assert dataset.report.first_overlong is not None
    assert "row 2 of" in dataset.report.first_overlong
    assert all(prompt + reference <= 60 for prompt, reference in dataset.lengths())
    with pytest.raises(DataError, match=r"row 2 of .* over max_prompt_length 40.*overlong_prompts: drop"):
        load([short, long_prompt], tokenizer, max_seq_length=60, max_prompt_length=40, overlong_prompts="error")
    with pytest.raises(DataError, match=r"row 1 of .* over max_reference_length 10"):
        load([long_reference], tokenizer, max_reference_length=10, overlong_prompts="error")


def test_prompt_and_reference_together_must_fit() -> None:
    tokenizer = byte_level()
    row = {"prompt": "Hello there, how are you today?", "ground_truth": "I am fine, thank you."}
    sizes = load([row], tokenizer).lengths()[0]
    assert len(load([row], tokenizer, max_seq_length=sum(sizes), max_prompt_length=sizes[0])) == 1
    with pytest.raises(DataError, match=f"{sizes[0]} \\+ {sizes[1]} tokens of prompt and reference, over max_seq_length"):
        load([row], tokenizer, max_seq_length=sum(sizes) - 1, max_prompt_length=sizes[0], overlong_prompts="error")


def test_prompt_limit_leaves_room_for_the_completion_by_default() -> None:
    with pytest.raises(ConfigError, match="max_completion_length 32 leaves no room"):
        load(rows(1), max_seq_length=32)
    sizes = load(rows(1)).lengths()[0]
    assert len(load(rows(1), max_seq_length=32 + sizes[0])) == 1
    with pytest.raises(DataError, match=f"over max_prompt_length {sizes[0] - 1}"):
        load(rows(1), max_seq_length=31 + sizes[0], overlong_prompts="error")


def test_remaining_turns_are_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    load([{**row, "remaining_turns": ["more"]} for row in rows(3)])
    assert [r.message for r in caplog.records if "remaining_turns" in r.message] == [
        "the list of rows: remaining_turns of 3 rows ignored (single-turn training)"
    ]


def test_fingerprint_follows_content_tokenizer_and_limits() -> None:
    first = load(rows(20)).fingerprint
    assert load(rows(20)).fingerprint == first
    others = [load(rows(19)), load(rows(20)[::-1]), load(rows(20), reference_end="none"), load(rows(20), system_prompt="Hi")]
    assert len({first, *(other.fingerprint for other in others)}) == 5


def test_batches_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(rows(50)).fingerprint
    monkeypatch.setattr("ebft_ds.data.prompts.ENCODE_BATCH", 7)
    assert load(rows(50)).fingerprint == whole


def split(count: int, *, seed: int = 1, source: Any = None, eval_source: Any = None, **fields: Any) -> tuple[list[int], list[int]]:
    data = DataSection(max_seq_length=128, eval_holdout=count, **fields)
    both = load_train_and_eval(data, ROLLOUT, chatml(), seed=seed, train_source=source or rows(40), eval_source=eval_source)
    held_out = both.evaluation
    return [both.train[i].prompt_id for i in range(len(both.train))], [
        held_out[i].prompt_id for i in range(len(held_out) if held_out else 0) if held_out
    ]


def test_held_out_rows_are_seeded_and_never_trained_on() -> None:
    train, held_out = split(8)
    assert len(held_out) == 8
    assert sorted(train + held_out) == list(range(40))
    assert split(8) == (train, held_out)
    assert split(8, seed=2)[1] != held_out
    assert split(0) == (list(range(40)), [])


def test_duplicates_of_held_out_prompts_leave_the_training_data() -> None:
    twice = [*rows(20), *rows(20)]
    data = DataSection(max_seq_length=128, eval_holdout=6)
    both = load_train_and_eval(data, ROLLOUT, chatml(), seed=3, train_source=twice)
    assert both.evaluation is not None
    held_out = {tuple(both.evaluation[i].token_ids) for i in range(6)}
    assert not held_out & {tuple(both.train[i].token_ids) for i in range(len(both.train))}
    assert both.train.report.held_out_duplicates == 40 - 6 - len(both.train) > 0
    with pytest.raises(DataError, match="leaves no training row"):
        split(40)


def test_max_train_rows_counts_source_rows() -> None:
    train, held_out = split(2, max_train_rows=10)
    assert sorted(train + held_out) == list(range(10))


def test_separate_evaluation_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "train.jsonl", rows(10))
    write(tmp_path / "eval.jsonl", rows(12)[8:])
    data = DataSection(max_seq_length=128, train_dataset=str(tmp_path / "train.jsonl"), eval_dataset=str(tmp_path / "eval.jsonl"))
    both = load_train_and_eval(data, ROLLOUT, chatml(), seed=0)
    assert both.evaluation is not None
    assert (len(both.train), len(both.evaluation)) == (10, 4)
    assert "2 training prompts" in caplog.text
    prompts = eval_prompts(both.evaluation, 3)
    assert [(p.prompt_id, p.index) for p in prompts] == [(0, -1), (1, -2), (2, -3)]
    with pytest.raises(ConfigError, match="both set"):
        split(2, eval_source=rows(3))
    with pytest.raises(ConfigError, match="set train_dataset"):
        load_train_and_eval(DataSection(), ROLLOUT, chatml(), seed=0)


def test_vocabulary_check() -> None:
    tokenizer = chatml()
    size = max(tokenizer.get_vocab().values()) + 1
    check_vocabulary(tokenizer, size)
    check_vocabulary(tokenizer, size + 64)
    with pytest.raises(ModelError, match=f"has id {size - 1}, the model's vocabulary ends at {size - 2}"):
        check_vocabulary(tokenizer, size - 1)
