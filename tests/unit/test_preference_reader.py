"""The order of preference rows: lazy, complete, seeded, resumable."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ebft_ds.data.file_rows as file_rows
from ebft_ds.collectives import Collectives
from ebft_ds.config.sections import DataSection, RewardSection
from ebft_ds.data.file_rows import JsonLines, UnreadableRow
from ebft_ds.data.parquet_rows import ParquetRows, RowGroupCache
from ebft_ds.data.preference import (
    EncodedResponses,
    EvaluationRows,
    PreferenceFeed,
    PreferenceFields,
    PreferenceReader,
    RewardEncoder,
    RewardEncoding,
    read_evaluation_rows,
)
from ebft_ds.errors import CheckpointError, ConfigError, DataError
from tests.unit.small_tokenizers import byte_level

ROWS = [{"prompt": f"question {i % 20} ", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(30)]
FIELDS = PreferenceFields()


def reader(
    source: Any = ROWS, *, seed: int = 5, shuffle: bool = True, data: dict[str, Any] | None = None, **reward: Any
) -> PreferenceReader:
    return PreferenceReader(
        source, data=DataSection(**data or {}), reward=RewardSection(**reward), seed=seed, shuffle=shuffle, split="train"
    )


def numbers(source: PreferenceReader, count: int) -> list[int]:
    return [number for number, _ in source.take(count)]


def feed(source: PreferenceReader, *, bad_rows: Any = "error", encoder: RewardEncoder | None = None, **recipe: Any) -> PreferenceFeed:
    encoder = encoder or RewardEncoder(byte_level(), RewardEncoding(**{"max_length": 64, **recipe}))
    return PreferenceFeed(source, encoder, Collectives(), fields=FIELDS, bad_rows=bad_rows)


def jsonl(path: Path, rows: list[Any] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    return path


def iterable(rows: list[Any] = ROWS) -> datasets.IterableDataset:
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)


SOURCES = {
    "list": lambda folder: ROWS,
    "Dataset": lambda folder: datasets.Dataset.from_list(ROWS),
    "jsonl": lambda folder: jsonl(folder / "rows.jsonl"),
    "parquet": lambda folder: parquet(folder / "rows.parquet"),
    "folder": lambda folder: jsonl(folder / "train.jsonl").parent,
}


@pytest.mark.parametrize("kind", [*SOURCES, "IterableDataset"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_is_every_row_once_and_resumed_equals_uninterrupted(kind: str, streaming: bool, shuffle: bool, tmp_path: Path) -> None:
    source = iterable() if kind == "IterableDataset" else SOURCES[kind](tmp_path)

    def fresh() -> PreferenceReader:
        return reader(source, shuffle=shuffle, streaming=streaming, shuffle_buffer_size=7)

    whole = fresh()
    expected = whole.take(95)
    for epoch in range(3):
        one = expected[epoch * 30 : (epoch + 1) * 30]
        assert sorted(number for number, _ in one) == list(range(30))
        assert all(row == ROWS[number] for number, row in one)
        assert ([number for number, _ in one] == list(range(30))) is not shuffle
    if shuffle:
        assert [n for n, _ in expected[:30]] != [n for n, _ in expected[30:60]]
    assert whole.rows == whole.rows_per_epoch == 30
    assert whole.epoch == pytest.approx(95 / 30)
    for stop in (0, 3, 7, 29, 30, 31, 64):
        first = fresh()
        first.take(stop)
        second = fresh()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.take(95 - stop) == expected[stop:]
    other = reader(source, seed=6, shuffle=shuffle, streaming=streaming, shuffle_buffer_size=7)
    assert ([n for n, _ in other.take(30)] == [n for n, _ in expected[:30]]) is not shuffle


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 12), buffer=st.integers(1, 15), stops=st.lists(st.integers(0, 20), max_size=4))
def test_streams_of_any_size_and_buffer_resume(count: int, buffer: int, stops: list[int]) -> None:
    def fresh() -> PreferenceReader:
        return reader(ROWS[:count], streaming=True, shuffle_buffer_size=buffer)

    expected = fresh().take(sum(stops) + 5)
    got: list[Any] = []
    state = fresh().state_dict()
    for stop in [*stops, 5]:
        part = fresh()
        part.load_state_dict(state)
        got += part.take(stop)
        state = part.state_dict()
    assert got == expected


class Untouchable(list[Any]):
    """A source that fails as soon as a row is taken."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a row was taken")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the rows were gone through")


def test_starting_takes_parses_and_encodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without streaming, from files, datasets and lists; the same work for any number of rows."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was parsed, mapped or tokenised")

    files = [jsonl(tmp_path / "rows.jsonl"), parquet(tmp_path / "rows.parquet")]
    streamed = iterable().map(refuse)
    tokenizer = byte_level()
    monkeypatch.setattr(file_rows, "parse_json_line", refuse)
    monkeypatch.setattr(ParquetRows, "_read", refuse)
    monkeypatch.setattr(datasets.Dataset, "__getitem__", refuse)
    monkeypatch.setattr(datasets.Dataset, "map", refuse)
    monkeypatch.setattr(type(tokenizer), "_encode_plus", refuse)
    for source in (Untouchable(ROWS), datasets.Dataset.from_list(ROWS), streamed, *files):
        for streaming in (False, True):
            started = reader(source, streaming=streaming)
            assert started.epoch == 0.0
    held = reader(Untouchable(ROWS), data={"eval_holdout": 3})
    assert held.rows == 27


def test_streaming_reads_no_more_than_a_block_ahead() -> None:
    taken: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for i in itertools.count():
            taken.append(i)
            yield ROWS[i % 30]

    endless = reader(datasets.IterableDataset.from_generator(rows), shuffle_buffer_size=10)
    assert endless.rows is None
    endless.take(11)
    assert len(taken) <= 21


def test_a_broken_stream_and_an_empty_one_are_data_errors(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise OSError("connection lost")

    with pytest.raises(DataError, match=r"streamed dataset: reading behind row 1 failed: connection lost"):
        reader(datasets.IterableDataset.from_generator(rows)).take(2)
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
        reader(jsonl(tmp_path / "empty.jsonl", []), streaming=True).take(1)
    with pytest.raises(DataError, match="No dataset at"):
        reader(str(tmp_path / "nothing.jsonl"), streaming=True)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_looking_ahead_moves_nothing(streaming: bool, shuffle: bool) -> None:
    source = reader(streaming=streaming, shuffle=shuffle, shuffle_buffer_size=7, data={} if streaming else {"eval_holdout": 3})
    before = source.state_dict()
    looked = source.look(4)
    assert 1 <= len(looked) <= 4
    assert (source.state_dict(), source.held_out_duplicates) == (before, 0)
    assert source.take(5)[: len(looked)] == looked
    for taken in (1, 9, 20):
        source.take(taken)
        ahead = source.look(3)
        assert source.take(3)[: len(ahead)] == ahead
    assert len(reader(ROWS[:2]).look(4)) == 2


def test_a_stream_is_opened_once_for_looking_and_taking() -> None:
    opened: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        opened.append(1)
        yield from ROWS

    source = reader(datasets.IterableDataset.from_generator(rows), shuffle_buffer_size=10)
    source.look(4)
    source.take(25)
    assert len(opened) == 1


class Broken(list[Any]):
    """A user's own source, with an error of its own."""

    def __getitem__(self, index: Any) -> Any:
        raise OSError("the disk is gone")


def corrupt(path: Path) -> Path:
    """A Parquet file whose footer is whole and whose pages are not."""
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    return path


def evaluation_rows(source: Any) -> Any:
    return read_evaluation_rows(
        source,
        data=DataSection(),
        reward=RewardSection(),
        encoder=RewardEncoder(byte_level(), RewardEncoding(max_length=64)),
        collectives=Collectives(),
        split=None,
        max_rows=None,
        name="held out",
    )


def test_sources_that_fail_later_are_data_errors(tmp_path: Path) -> None:
    lines = jsonl(tmp_path / "rows.jsonl")
    opened = [reader(lines), reader(lines, streaming=True)]
    held = reader(lines, data={"eval_holdout": 2}).held_out
    lines.unlink()
    for source, message in zip(opened, [r"of rows\.jsonl .*cannot be read: .*No such file", "reading behind row 0 failed"], strict=True):
        with pytest.raises(DataError, match=message):
            feed(source).next_rows(1)
    with pytest.raises(DataError, match=r"of rows\.jsonl .*cannot be read: .*No such file"):
        evaluation_rows(held)
    pages = corrupt(parquet(tmp_path / "rows.parquet"))
    for start in (lambda: reader(pages).take(1), lambda: reader(pages, streaming=True).take(1), lambda: evaluation_rows(pages)):
        with pytest.raises(DataError, match=r"rows\.parquet.*(cannot be read|failed): "):
            start()
    with pytest.raises(DataError, match=r"row 1 of the list of rows \(index 0\) cannot be read: the disk is gone"):
        evaluation_rows(Broken(ROWS))

    def failing() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise OSError("connection lost")

    with pytest.raises(DataError, match="reading behind row 1 failed: connection lost"):
        evaluation_rows(datasets.IterableDataset.from_generator(failing))


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_that_cannot_be_opened_are_data_errors(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "not.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "not.json").write_bytes(b"[1, 2")
    for name in ("not.parquet", "not.json"):
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            reader(tmp_path / name, streaming=streaming).take(1)


def test_parquet_is_read_by_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(str(path), batch_size=8)
    read: list[int] = []
    original = pyarrow.parquet.ParquetFile.read_row_group

    def counted(self: Any, group: int) -> Any:
        read.append(group)
        return original(self, group)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", counted)
    rows = ParquetRows(path)
    assert (len(rows), read) == (30, [])
    assert (rows[9], rows[15], rows[8]) == (ROWS[9], ROWS[15], ROWS[8])
    assert read == [1]
    assert list(rows) == ROWS
    assert sorted(read) == [0, 1, 2, 3]
    read.clear()
    small = ParquetRows(path, RowGroupCache(most_bytes=1))
    assert [small[i] for i in (0, 1, 29, 28, 0)] == [ROWS[i] for i in (0, 1, 29, 28, 0)]
    assert read == [0, 3, 0]


def test_what_checkpoints_compare_is_read_once() -> None:
    taken: list[int] = []

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            taken.append(index)
            return super().__getitem__(index)

    source = reader(Counted(ROWS))
    source.take(1)
    before = len(taken)
    assert source.state_dict()["fingerprint"] == source.state_dict()["fingerprint"] == reader().state_dict()["fingerprint"]
    assert len(taken) == before


def test_lines_are_found_without_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\r\n\n  \n{"a": 2,}\n{"a": "\xff"}\n{"a": 3}')
    for chunk in (1 << 24, 3):
        monkeypatch.setattr(file_rows, "CHUNK", chunk)
        rows = JsonLines(path)
        assert len(rows) == 4
        assert list(rows.lines) == [1, 4, 5, 6]
        assert (rows[0], rows[3]) == ({"a": "\u2028"}, {"a": 3})
        assert [row.reason.split(" (")[0] for row in (rows[1], rows[2])] == ["line 4 is not valid JSON", "line 5 is not UTF-8 text"]
        assert rows[2:] == [UnreadableRow(rows[2].reason), {"a": 3}]
        with pytest.raises(IndexError):
            rows[4]
    streamed = reader(path, streaming=True, shuffle=False)
    assert [row for _, row in streamed.take(4)] == list(rows)


def test_held_out_rows_and_their_prompts_are_not_trained_on() -> None:
    source = reader(data={"eval_holdout": 5})
    held = source.held_out
    assert held is not None
    prompts = {held.row(number)["prompt"] for number in held.numbers}
    alike = [i for i, row in enumerate(ROWS) if row["prompt"] in prompts and i not in held.numbers]
    assert alike, "the rows repeat prompts"
    expected = sorted(set(range(30)) - set(held.numbers) - set(alike))
    assert sorted(numbers(source, len(expected))) == expected
    assert source.rows == 25
    source.take(len(expected))
    assert source.held_out_duplicates >= len(alike)
    again = reader(data={"eval_holdout": 5}).held_out
    assert again is not None
    assert again.numbers == held.numbers
    other = reader(data={"eval_holdout": 5}, seed=6).held_out
    assert other is not None
    assert other.numbers != held.numbers
    assert reader().held_out is None
    assert set(numbers(reader(data={"max_train_rows": 4}), 8)) == {0, 1, 2, 3}
    with pytest.raises(DataError, match="leaves no training row of the 30"):
        reader(data={"eval_holdout": 30})
    with pytest.raises(DataError, match="every training row has the prompt of a held-out one"):
        reader([ROWS[0]] * 3, data={"eval_holdout": 1}).take(1)
    for setting in ({"eval_holdout": 2}, {"max_train_rows": 2}):
        with pytest.raises(ConfigError, match="needs rows by number"):
            reader(iterable(), data=setting)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: reader([*ROWS[:-1], {**ROWS[-1], "chosen": "else"}]), "the training data was"),
        (lambda: reader(ROWS[:20]), "number of training rows was 30, now it is 20"),
        (lambda: reader(seed=6), "seed was 5, now it is 6"),
        (lambda: reader(shuffle=False), "shuffle was True"),
        (lambda: reader(streaming=True), "streaming"),
        (lambda: reader(data={"eval_holdout": 2}), "number of training rows was 30, now it is 28"),
    ],
)
def test_the_state_of_another_order_is_refused(other: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        other().load_state_dict(reader().state_dict())
    with pytest.raises(CheckpointError, match="has no kind"):
        reader().load_state_dict({"progress": {"position": 3}})


def test_a_feed_gives_encoded_rows_and_goes_on_where_it_was() -> None:
    whole = feed(reader())
    expected = [whole.next_rows(4) for _ in range(10)]
    assert (whole.rows_seen, whole.epoch) == (40, 40 / 30)
    first = feed(reader())
    assert [first.next_rows(4) for _ in range(3)] == expected[:3]
    second = feed(reader())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.rows_seen == 12
    assert [second.next_rows(4) for _ in range(7)] == expected[3:]
    with pytest.raises(CheckpointError, match="another encoding of rows"):
        feed(reader(), max_length=63).load_state_dict(first.state_dict())
    with pytest.raises(CheckpointError, match="has no rows_seen, epoch"):
        feed(reader()).load_state_dict({"encoding": "", "reader": {}})


def test_left_out_rows_are_replaced_and_bad_ones_named_or_counted(tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "rejected": ROWS[1]["chosen"]}, {"prompt": "Q", "chosen": "a"}, ROWS[3]]
    path = jsonl(tmp_path / "pairs.jsonl", rows)
    skipping = feed(reader(path, shuffle=False), bad_rows="skip")
    assert [row.row for row in skipping.next_rows(3)] == [0, 3, 0]
    counts = skipping.counts()
    assert (counts.rows, counts.used, counts.identical, counts.bad_rows) == (5, 3, 1, 1)
    assert "1 bad, skipped (first: row 3 of pairs.jsonl has no rejected" in counts.summary()
    strict = feed(reader(path, shuffle=False))
    with pytest.raises(DataError, match=r"row 3 of pairs\.jsonl has no rejected.*set bad_rows: skip"):
        strict.next_rows(3)
    for streaming in (False, True):
        hopeless = feed(reader([rows[1]] * 3, streaming=streaming))
        with pytest.raises(DataError, match=r"No usable preference row in a whole epoch\. 0 of .* with identical responses"):
            hopeless.next_rows(2)


@pytest.mark.parametrize("source", [ROWS, iterable()], ids=["list", "stream"])
def test_evaluation_rows_come_once_and_in_order(source: Any) -> None:
    encoder = RewardEncoder(byte_level(), RewardEncoding(max_length=64))

    def read(rows: Any, most: int | None, bad_rows: Any = "error") -> list[int]:
        found = read_evaluation_rows(
            rows,
            data=DataSection(bad_rows=bad_rows),
            reward=RewardSection(),
            encoder=encoder,
            collectives=Collectives(),
            split=None,
            max_rows=most,
            name="held out",
        )
        return [row.row for row in found]

    assert read(source, None) == list(range(30))
    assert read(source, 4) == [0, 1, 2, 3]
    held = reader(data={"eval_holdout": 5}).held_out
    assert held is not None
    assert read(held, None) == list(held.numbers)
    assert read(held, 2) == list(held.numbers)[:2]
    broken = [*ROWS[:2], {"chosen": "x"}]
    assert read(broken, None, "skip") == [0, 1]
    with pytest.raises(DataError, match=r"row 3 of the list of rows \(index 2\) has no rejected"):
        read(broken, None)
    with pytest.raises(DataError, match="held out has no usable row"):
        read([{"chosen": "x", "rejected": "x"}], None)


def test_evaluation_rows_are_kept_compactly_and_given_whole() -> None:
    rows = [
        EncodedResponses([[5, 6, 1], [5, 7]], 1, 0.25, 0.5, "math", 3),
        EncodedResponses([[1], [2], [9, 8, 7]], 0, row=4),
        EncodedResponses([[400_000, 2], [400_000, 3]], 1, row=5),
    ]
    kept = EvaluationRows(rows[:1])
    kept.extend(rows[1:])
    assert list(kept) == rows
    assert (len(kept), kept[-1], kept[1:]) == (3, rows[2], rows[1:])
    with pytest.raises(IndexError):
        kept[3]
    found = evaluation_rows(ROWS)
    assert isinstance(found, EvaluationRows)
    assert found[7] == feed(reader(shuffle=False)).next_rows(8)[7]
