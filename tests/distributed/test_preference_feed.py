"""Preference rows over ranks: the same ones for any world size, none lost or repeated, and errors on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import pytest

from ebft_ds.collectives import Collectives
from ebft_ds.config.sections import DataSection, RewardSection
from ebft_ds.data.preference import (
    EncodedResponses,
    PreferenceFeed,
    PreferenceFields,
    PreferenceReader,
    RewardEncoder,
    RewardEncoding,
    read_evaluation_rows,
)
from ebft_ds.errors import EbftError
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.unit.small_tokenizers import CHATML, byte_level

COUNT = 23
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"question {i}"}], "chosen": f"good {i}", "rejected": f"bad {i}", "margin": i}
    for i in range(COUNT)
]
IDENTICAL = {4, 9}
BAD = 15
ROWS = [{**row, "rejected": row["chosen"]} if i in IDENTICAL else row for i, row in enumerate(ROWS)]
ROWS[BAD] = {"prompt": "no responses"}
USABLE = set(range(COUNT)) - IDENTICAL - {BAD}


class Failing(list[Any]):
    """A source none of whose rows can be read."""

    def __init__(self, rows: list[Any], error: Exception) -> None:
        super().__init__(rows)
        self._error = error

    def __getitem__(self, index: Any) -> Any:
        raise self._error


def make_feed(collectives: Collectives, rows: Any, *, streaming: bool, bad_rows: Any, template: str | None = CHATML) -> PreferenceFeed:
    data, reward = DataSection(max_seq_length=64), RewardSection(streaming=streaming, shuffle_buffer_size=8)
    reader = PreferenceReader(rows, data=data, reward=reward, seed=3, shuffle=True, split="train") if collectives.is_main else None
    encoder = RewardEncoder(byte_level(template), RewardEncoding.of(reward, data))
    return PreferenceFeed(reader, encoder, collectives, fields=PreferenceFields.of(reward, data), bad_rows=bad_rows)


def failure(action: Any) -> str:
    try:
        action()
    except (EbftError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(collectives: Collectives) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for streaming in (False, True):
        whole = make_feed(collectives, ROWS, streaming=streaming, bad_rows="skip")
        steps = [whole.next_rows(5) for _ in range(12)]
        first = make_feed(collectives, ROWS, streaming=streaming, bad_rows="skip")
        for _ in range(5):
            first.next_rows(5)
        second = make_feed(collectives, ROWS, streaming=streaming, bad_rows="skip")
        second.load_state_dict(collectives.all_gather(first.state_dict())[0])
        answers[f"streaming {streaming}"] = {
            "rows": [row for step in steps for row in step],
            "resumed": [row for _ in range(7) for row in second.next_rows(5)],
            "counts": whole.counts().summary(),
            "seen": (whole.rows_seen, whole.epoch, second.rows_seen, second.epoch),
        }
    answers["strict"] = failure(lambda: make_feed(collectives, ROWS, streaming=False, bad_rows="error").next_rows(COUNT))
    chats = [row for i, row in enumerate(ROWS) if i in USABLE][:1]
    answers["no template"] = failure(lambda: make_feed(collectives, chats, streaming=False, bad_rows="skip", template=None).next_rows(1))
    nothing: Any = datasets.IterableDataset.from_generator(lambda: iter(()))
    answers["empty"] = failure(lambda: make_feed(collectives, nothing, streaming=True, bad_rows="skip").next_rows(1))
    gone, wrong = Failing(ROWS, OSError("the disk is gone")), Failing(ROWS, ZeroDivisionError("a user's mistake"))
    answers["gone"] = failure(lambda: make_feed(collectives, gone, streaming=False, bad_rows="skip").next_rows(2))
    answers["wrong"] = failure(lambda: make_feed(collectives, wrong, streaming=False, bad_rows="skip").next_rows(2))
    answers["no evaluation"] = failure(lambda: evaluation_rows(collectives, gone))
    answers["evaluation"] = [row.row for row in evaluation_rows(collectives, ROWS)]
    return answers


def evaluation_rows(collectives: Collectives, rows: Any) -> Sequence[EncodedResponses]:
    return read_evaluation_rows(
        rows if collectives.is_main else None,
        data=DataSection(bad_rows="skip"),
        reward=RewardSection(),
        encoder=RewardEncoder(byte_level(CHATML), RewardEncoding(max_length=64)),
        collectives=collectives,
        split=None,
        max_rows=20,
        name="held out",
    )


RANKS = RankAnswers(lambda world_size: [work(Collectives())] if world_size == 1 else run_ranks(world_size, work))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_rank_gets_the_rows_of_one_process(world_size: int, streaming: bool) -> None:
    key = f"streaming {streaming}"
    alone = RANKS[1][0][key]
    for answer in RANKS[world_size]:
        assert answer[key] == alone
    numbers = [row.row for row in alone["rows"]]
    for epoch in range(3):
        assert set(numbers[epoch * len(USABLE) : (epoch + 1) * len(USABLE)]) == USABLE
    assert all(row.margin == row.row for row in alone["rows"])
    assert alone["resumed"] == alone["rows"][25:]
    assert alone["seen"][0] == alone["seen"][2]
    assert "bad, skipped" in alone["counts"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_errors_reach_every_rank(world_size: int) -> None:
    answers = RANKS[world_size]
    for answer in answers:
        assert answer["strict"].startswith(f"DataError: row {BAD + 1} of the list of rows (index {BAD}) has no chosen")
    assert answers[0]["no template"].startswith("DataError: row 1 of the list of rows (index 0) is a chat prompt")
    assert answers[0]["empty"] == "DataError: the streamed dataset has no rows."
    assert answers[0]["wrong"] == "ZeroDivisionError: a user's mistake"
    for key in ("gone", "no evaluation"):
        assert answers[0][key].startswith("DataError: row ")
        assert answers[0][key].endswith("cannot be read: the disk is gone")
    for answer in answers[1:]:
        for key in ("gone", "wrong", "no evaluation"):
            assert answer[key].startswith("PeerError: rank 0 cannot read")
        assert answer["no template"].startswith("PeerError: another rank cannot encode its rows: row 1 of the list")
        assert answer["empty"].startswith("PeerError: rank 0 cannot read")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_rows_are_the_same_everywhere(world_size: int) -> None:
    for answer in RANKS[world_size]:
        assert answer["evaluation"] == sorted(i for i in USABLE if i < 20)
