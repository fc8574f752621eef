"""RewardCollator and the collect functions, called by a torch DataLoader, Grain, rows of tfds, and by hand."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ebft_ds.data.preference import (
    EncodedResponses,
    PreferenceFields,
    RewardCollator,
    RewardEncoding,
    grain_collect_function,
    rows_of_batch,
    tfds_collect_function,
)
from ebft_ds.errors import ConfigError, DataError
from tests.unit.small_tokenizers import CHATML, byte_level, user

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "reward_vectors.json").read_text(encoding="utf-8"))
ROWS = [{"prompt": f"question {i}", "chosen": "good " * (i + 1), "rejected": "bad", "margin": i / 2} for i in range(8)]
SIDES = [f"{kind}_{side}" for kind in ("input_ids", "attention_mask") for side in ("chosen", "rejected")]


@pytest.mark.parametrize("case", VECTORS["collator"], ids=lambda case: f"multiple of {case['pad_to_multiple_of']}")
def test_the_batches_are_trls(case: dict[str, Any]) -> None:
    tokenizer = byte_level()
    tokenizer.pad_token_id = case["pad_token_id"]
    batch = RewardCollator(tokenizer, pad_to_multiple_of=case["pad_to_multiple_of"])(case["examples"])
    assert batch["input_ids"].tolist() == case["input_ids"]
    assert batch["attention_mask"].tolist() == case["attention_mask"]
    assert batch["margin"].tolist() == case["margin"]
    assert batch["margin"].dtype == torch.float32
    assert batch["input_ids_chosen"].tolist() == case["input_ids"][:2]
    assert batch["attention_mask_rejected"].tolist() == case["attention_mask"][2:]
    assert set(batch) == {"input_ids", "attention_mask", "margin", *SIDES}


def test_one_row_is_a_batch_of_one_and_pad_may_be_eos() -> None:
    collate = RewardCollator(byte_level(pad="</s>", padding_side="left"))
    one = collate({"prompt": "Q: ", "chosen": "good answer", "rejected": ""})
    assert one["input_ids"].shape == one["attention_mask"].shape
    assert one["input_ids"].shape[0] == 2
    for side in ("chosen", "rejected"):
        length = int(one[f"attention_mask_{side}"].sum())
        assert one[f"input_ids_{side}"][0, length - 1] == 1
        assert one[f"attention_mask_{side}"][0].tolist() == [1] * length + [0] * (one["input_ids"].shape[1] - length)
    assert "margin" not in one


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_torch_dataloader(workers: int) -> None:
    collate = RewardCollator(byte_level(), max_length=8, truncation_mode="keep_start")
    loader = DataLoader(ROWS, batch_size=4, collate_fn=collate, num_workers=workers)  # type: ignore[arg-type]
    batches = list(loader)
    assert [batch["margin"].tolist() for batch in batches] == [[0.0, 0.5, 1.0, 1.5], [2.0, 2.5, 3.0, 3.5]]
    assert all(batch["input_ids"].shape[1] <= 8 for batch in batches)
    direct = collate(ROWS[4:])
    assert all(torch.equal(batches[1][key], direct[key]) for key in direct)
    assert pickle.loads(pickle.dumps(collate))(ROWS)["input_ids"].shape[0] == 16


@pytest.mark.parametrize("mode", ["keep_end", "keep_start"])
def test_lengths_are_honoured(mode: Any) -> None:
    row = {"prompt": "one two three four five six seven", "chosen": " good answer", "rejected": " bad"}
    tokenizer = byte_level()
    whole = RewardCollator(tokenizer)(row)
    full = whole["input_ids_chosen"][0][whole["attention_mask_chosen"][0].bool()].tolist()
    cut = RewardCollator(tokenizer, 10, mode)(row)["input_ids_chosen"][0].tolist()
    assert cut == (full[-10:] if mode == "keep_end" else [*full[:9], 1])
    given = RewardEncoding(max_length=10, truncation_mode=mode, identical_pairs="keep")
    assert RewardCollator(tokenizer, encoding=given)(row)["input_ids_chosen"][0].tolist() == cut
    with pytest.raises(DataError, match=r"leaves out every row of the batch \(identical\)"):
        RewardCollator(tokenizer, encoding=RewardEncoding(max_length=64))({"chosen": "a", "rejected": "a"})
    with pytest.raises(DataError, match=r"leaves out every row of the batch \(too long\)"):
        RewardCollator(tokenizer, 10, "drop")(row)
    assert len(RewardCollator(tokenizer, 10, "drop")([row, {"chosen": "a", "rejected": "b"}])["input_ids"]) == 2


def test_rankings_and_other_columns() -> None:
    tokenizer = byte_level()
    ranked = {"prompt": "Q", "responses": [" a", " b", " c"], "subset": "math", "id": 7}
    pair = {"prompt": "Q", "chosen": " d", "rejected": " e", "preference": 0.5}
    batch = RewardCollator(tokenizer, remove_unused_columns=False)([ranked, pair])
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert texts == ["Q a</s>", "Q d</s>", "Q b</s>", "Q e</s>", "Q c</s>"]
    assert batch["num_responses"].tolist() == [3, 2]
    assert batch["preference"].tolist() == [1.0, 0.5]
    assert (batch["subset"], batch["id"]) == (["math", None], [7, None])
    assert "id" not in RewardCollator(tokenizer)([ranked])
    with pytest.raises(DataError, match=r"row 1 of the batch has bytes that are not UTF-8 text .* in id"):
        RewardCollator(tokenizer, remove_unused_columns=False)([{**ranked, "id": b"\xff"}])
    rows = rows_of_batch(batch)
    assert [len(row.group) for row in rows] == [3, 2]
    assert [(row.preference, row.subset, row.margin) for row in rows] == [(1.0, "math", 0.0), (0.5, None, 0.0)]
    assert [[tokenizer.decode(ids) for ids in row.group] for row in rows] == [["Q a</s>", "Q b</s>", "Q c</s>"], ["Q d</s>", "Q e</s>"]]


def test_what_a_collator_gave_becomes_rows_again() -> None:
    batch = RewardCollator(byte_level(pad="</s>"))(ROWS)
    rows = rows_of_batch(batch)
    assert [row.margin for row in rows] == [row["margin"] for row in ROWS]
    assert rows == rows_of_batch({key: batch[key] for key in [*SIDES, "margin"]})
    assert rows == rows_of_batch({key: batch[key] for key in ("input_ids", "attention_mask", "margin")})
    left = {
        "input_ids_chosen": [[1, 5, 1], [5, 5, 1]],
        "attention_mask_chosen": [[0, 1, 1], [1, 1, 1]],
        "input_ids_rejected": np.array([[5, 6, 1], [1, 5, 1]]),
        "attention_mask_rejected": np.array([[1, 1, 1], [0, 1, 1]]),
    }
    assert rows_of_batch(left) == [
        EncodedResponses([[5, 1], [5, 6, 1]], 1, row=0),
        EncodedResponses([[5, 5, 1], [5, 1]], 1, row=1),
    ]


PAIR = {f"{kind}_{side}": [[1], [1]] for kind in ("input_ids", "attention_mask") for side in ("chosen", "rejected")}
TRIPLE = {"input_ids": [[1], [2], [3]], "attention_mask": [[1]] * 3, "num_responses": [3]}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [1]}, "gave labels; it must give input_ids_chosen"),
        ({"input_ids": [[1]]}, "with an attention_mask of that shape, not none"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1], [0]]}, "Row 1 of attention_mask keeps no token"),
        ({"input_ids": [[1]] * 3, "attention_mask": [[1]] * 3}, "3 sequences"),
        ({"input_ids": [[1]] * 3, "attention_mask": [[1]] * 3, "num_responses": [2, 1]}, r"rows with \[2, 1\] responses"),
        ({"input_ids": [[1]] * 2, "attention_mask": [[1]] * 2, "margin": [1.0, 2.0]}, "2 values of margin for 1 rows"),
        ({"input_ids": [[1], [2, 3]], "attention_mask": [[1], [1, 1]]}, "input_ids of the data collator's batch is no array"),
        ({"input_ids": [[1.0]] * 2, "attention_mask": [[1]] * 2}, "input_ids .* holds float64"),
        ({**PAIR, "input_ids_rejected": [[1], [-1]]}, "Row 1 of input_ids_rejected has the token -1; ids begin at 0"),
        ({**PAIR, "margin": [0.0, float("inf")]}, "Row 1 .* has a margin that is inf"),
        ({**PAIR, "margin": [[0.0], [1.0]]}, r"Row 0 .* has a margin that is \[0.0\]"),
        ({**PAIR, "margin": torch.tensor(1.0)}, "1 values of margin for 2 rows"),
        ({**PAIR, "preference": torch.tensor([0.5, 1.5])}, "Row 1 .* has a preference of 1.5"),
        ({**PAIR, "preference": [0.5, None]}, "Row 1 .* has a preference that is None"),
        ({**PAIR, "subset": ["a", 3]}, "Row 1 .* has a subset that is a int"),
        ({**TRIPLE, "margin": [0.5]}, "Row 0 .* has a margin of 0.5 beside 3 responses; it is of a pair"),
        ({**TRIPLE, "preference": [0.5]}, "Row 0 .* has a preference of 0.5 beside 3 responses"),
        ({**TRIPLE, "num_responses": 3}, "3 sequences"),
    ],
)
def test_batches_that_are_none_are_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of_batch(batch)


def test_ids_are_held_against_the_vocabulary_where_it_is_known() -> None:
    given = {**PAIR, "input_ids_chosen": [[4], [5]], "margin": [torch.tensor(0.5), np.float32(2)]}
    assert [row.margin for row in rows_of_batch(given, vocab_size=6)] == [0.5, 2.0]
    with pytest.raises(DataError, match="Row 1 of input_ids_chosen has the token 5; the model knows 0 to 4"):
        rows_of_batch(given, vocab_size=5)
    padding = {**PAIR, "input_ids_chosen": [[4, -100], [4, 4]], "attention_mask_chosen": [[1, 0], [1, 1]]}
    assert rows_of_batch(padding, vocab_size=5)[0].group == [[4], [1]]
    assert rows_of_batch({**TRIPLE, "margin": [0.0], "preference": [1.0]})[0].group == [[1], [2], [3]]


def test_collect_functions_pad_to_a_multiple() -> None:
    for function in (grain_collect_function, tfds_collect_function):
        collect = function(byte_level(), 12, pad_to_multiple_of=8)
        assert collect(ROWS)["input_ids"].shape == (16, 16)
        assert collect(ROWS[0])["input_ids_chosen"].shape == (16,)
        assert collect(ROWS)["attention_mask"].sum(axis=1).max() <= 12
        with pytest.raises(ConfigError, match="pad_to_multiple_of 0"):
            function(byte_level(), 12, pad_to_multiple_of=0)


def test_bad_rows_of_a_batch_are_named() -> None:
    with pytest.raises(DataError, match="row 2 of the batch has no rejected"):
        RewardCollator(byte_level())([ROWS[0], {"chosen": "a"}])
    with pytest.raises(ConfigError, match="pad_to_multiple_of 0"):
        RewardCollator(byte_level(), pad_to_multiple_of=0)


def test_grain_maps_rows_and_batches_them() -> None:
    import grain

    tokenizer = byte_level(CHATML)
    rows = [{"prompt": user(row["prompt"]), "chosen": row["chosen"], "rejected": row["rejected"], "margin": row["margin"]} for row in ROWS]
    collect = grain_collect_function(tokenizer, 24, "keep_start")
    by_map = list(grain.MapDataset.source(rows).shuffle(seed=3).map(collect).batch(4))
    by_batch = list(grain.MapDataset.source(rows).shuffle(seed=3).batch(4, batch_fn=collect))
    assert len(by_map) == len(by_batch) == 2
    for mapped, batched in zip(by_map, by_batch, strict=True):
        for key in [*SIDES, "margin", "preference"]:
            assert mapped[key].shape[0] == 4
            assert np.array_equal(mapped[key], batched[key])
        assert mapped["input_ids_chosen"].shape == (4, 24)
        assert rows_of_batch(mapped) == rows_of_batch(batched)
        for row in rows_of_batch(mapped):
            assert all(ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") for ids in row.group)
    margins = sorted(float(m) for batch in by_map for m in batch["margin"])
    assert margins == [row["margin"] for row in ROWS]


def test_grain_with_rankings_and_an_iterator() -> None:
    import grain

    rows = [{"prompt": "Q", "responses": [f" a{i}", f" b{i}", " c"]} for i in range(4)]
    dataset = grain.MapDataset.source(rows).map(grain_collect_function(byte_level(), 12)).batch(2)
    batches = list(dataset.to_iter_dataset())
    assert [batch["input_ids"].shape for batch in batches] == [(2, 3, 12)] * 2
    assert set(batches[0]) == {"input_ids", "attention_mask", "margin", "preference"}


def test_rows_as_tfds_yields_them() -> None:
    """Bytes, arrays of ids, and sequences of messages as one object of arrays."""
    tokenizer = byte_level(CHATML)
    texts = [
        {"prompt": row["prompt"].encode(), "chosen": row["chosen"].encode(), "rejected": b"bad", "margin": np.float32(1)} for row in ROWS
    ]
    collect = tfds_collect_function(tokenizer, 16)
    batch = collect(texts)
    plain = RewardCollator(tokenizer, 16)(ROWS)
    assert batch["input_ids"].shape == (16, 16)
    width = plain["input_ids"].shape[1]
    assert batch["input_ids"][:, :width].tolist() == plain["input_ids"].tolist()
    assert batch["margin"].dtype == np.float32
    ids = {
        "input_ids_chosen": np.array([2, 2, 9, 8, 1], np.int32),
        "attention_mask_chosen": np.array([0, 0, 1, 1, 1], np.int32),
        "input_ids_rejected": np.arange(5, 25),
        "attention_mask_rejected": np.ones(20, bool),
    }
    one = collect(ids)
    assert one["input_ids_chosen"].tolist() == [9, 8, 1] + [tokenizer.pad_token_id] * 13
    assert one["input_ids_rejected"].tolist() == list(range(9, 25))
    messages = {"role": np.array([b"user", b"assistant"], object), "content": np.array([b"Q", b"good"], object)}
    chat = collect({"chosen": messages, "rejected": {**messages, "content": np.array([b"Q", b"bad"], object)}})
    assert tokenizer.decode(chat["input_ids_chosen"][chat["attention_mask_chosen"].astype(bool)]).endswith("assistant\ngood<|im_end|>")


def test_collect_functions_refuse_to_drop_and_know_renamed_fields() -> None:
    with pytest.raises(ConfigError, match="takes keep_end or keep_start"):
        grain_collect_function(byte_level(), 16, "drop")  # type: ignore[arg-type]
    collect = tfds_collect_function(byte_level(), 16, fields=PreferenceFields(chosen="win", rejected="lose"))
    assert collect({"win": "a", "lose": "a"})["attention_mask_chosen"].sum() == 2
    with pytest.raises(DataError, match="has no win"):
        collect({"chosen": "a", "rejected": "b"})
