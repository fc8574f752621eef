"""Where rows come from, and what a user reads when they cannot be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from ebft_ds.data.file_rows import UnreadableRow
from ebft_ds.data.sources import read_rows
from ebft_ds.errors import DataError

ROWS = [{"prompt": f"question {i}", "ground_truth": f"answer {i}"} for i in range(5)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def all_rows(source: Any, **options: Any) -> list[Any]:
    table = read_rows(source, **options)
    return [table.row(i) for i in range(len(table))]


def parquet(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    return path


def saved(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


def json_array(path: Path) -> Path:
    path.write_text(json.dumps(ROWS), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: jsonl(folder / "rows.jsonl", ROWS),
        lambda folder: json_array(folder / "rows.json"),
        lambda folder: parquet(folder / "rows.parquet"),
        lambda folder: saved(folder / "saved"),
        lambda folder: jsonl(folder / "many" / "rows.jsonl", ROWS).parent,
        lambda folder: ROWS,
        lambda folder: datasets.Dataset.from_list(ROWS),
        lambda folder: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
    ],
    ids=["jsonl", "json", "parquet", "save_to_disk", "folder", "list", "Dataset", "DatasetDict"],
)
def test_every_kind_of_source_gives_the_same_rows(make: Any, tmp_path: Path) -> None:
    assert all_rows(make(tmp_path)) == ROWS


def test_paths_may_be_strings_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert all_rows("rows.jsonl") == ROWS


def test_missing_path_names_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=str(tmp_path / "data" / "nothing.jsonl")):
        read_rows("data/nothing.jsonl")


def test_hub_name_offline_says_both_places_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"someone/some-data.*hub did not give it.*Offline"):
        read_rows("someone/some-data")


def test_bad_json_keeps_its_line_number_and_the_rows_around_it(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2,}\n{"a": 3}\n', encoding="utf-8")
    table = read_rows(path)
    assert len(table) == 3
    bad = table.row(1)
    assert isinstance(bad, UnreadableRow)
    assert "line 3 is not valid JSON" in bad.reason
    assert table.where(1) == "row 2 of prompts.jsonl (line 3)"
    assert table.row(2) == {"a": 3}


def test_line_separators_inside_strings_do_not_break_lines(tmp_path: Path) -> None:
    rows = [{"prompt": "one\u2028two\x85three", "ground_truth": "x"}, {"prompt": "b", "ground_truth": "y"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows), encoding="utf-8", newline="")
    assert all_rows(path) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"a": "\xff\xfe"}\n', "not UTF-8"),
        ("rows.parquet", b"no parquet at all", "cannot be read"),
        ("rows.json", b'[{"a": 1},\n {"a": ]', "line 2, column 8"),
        ("rows.csv", b"a,b\n", ".csv are not read; use .jsonl"),
        ("rows.jsonl", b"\n\n", "has no rows"),
    ],
)
def test_unusable_files_are_refused_by_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_rows(tmp_path / name)
    assert name in str(error.value)


def test_folder_with_named_splits_never_mixes_them(tmp_path: Path) -> None:
    jsonl(tmp_path / "train-00000.jsonl", ROWS[:2])
    jsonl(tmp_path / "train-00001.jsonl", ROWS[2:4])
    jsonl(tmp_path / "test.jsonl", ROWS[4:])
    assert all_rows(tmp_path) == ROWS[:4]
    assert all_rows(tmp_path, split="test") == ROWS[4:]
    assert all_rows(tmp_path, split=None) == ROWS[4:]
    with pytest.raises(DataError, match=r"no split 'dev'; it has test, train"):
        read_rows(tmp_path, split="dev")


def test_folder_rows_are_located_in_their_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ROWS[:2])
    jsonl(tmp_path / "b.jsonl", ROWS[2:])
    table = read_rows(tmp_path)
    assert [table.row(i) for i in range(len(table))] == ROWS
    assert table.where(3) == "row 2 of b.jsonl"


def test_metadata_beside_data_files_is_not_read_as_rows(tmp_path: Path) -> None:
    jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    (tmp_path / "dataset_infos.json").write_text('{"default": {"splits": 1}}', encoding="utf-8")
    assert all_rows(tmp_path) == ROWS


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        read_rows(tmp_path)


def test_dataset_dict_splits(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:3]), "validation": datasets.Dataset.from_list(ROWS[3:])})
    both.save_to_disk(str(tmp_path / "both"))
    assert all_rows(tmp_path / "both") == ROWS[:3]
    assert all_rows(both, split=None) == ROWS[3:]
    with pytest.raises(DataError, match="no split 'test'"):
        read_rows(both, split="test")


def test_streamed_datasets_and_other_objects_are_refused() -> None:
    with pytest.raises(DataError, match="IterableDataset cannot be used"):
        read_rows(datasets.Dataset.from_list(ROWS).to_iterable_dataset())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no rows"):
        read_rows([])
