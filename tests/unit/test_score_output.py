"""The file of scores: what a stopped run goes on with, and what it refuses to go on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.errors import ConfigError
from ebft_ds.trainers.score_output import ScoredBy, ScoreOutput, input_identity, model_identity, sound_end

SCORED_BY = ScoredBy({"bytes": 3}, {"config.json": [10, "ab"]}, {"dtype": "float32"})


def opened(path: Path, scored_by: ScoredBy = SCORED_BY, *, overwrite: bool = False) -> ScoreOutput:
    return ScoreOutput(path, scored_by, overwrite=overwrite)


def lines(*numbers: int) -> list[dict[str, Any]]:
    return [{"line": number, "scores": [0.5 * number]} for number in numbers]


def test_a_second_run_goes_on_after_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = opened(path)
    assert first.done == 0
    first.append(lines(1, 2, 5))
    first.close()
    second = opened(path)
    assert second.done == 5
    second.append(lines(6))
    second.close()
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [1, 2, 5, 6]


@given(cut=st.integers(0, 200))
def test_wherever_a_write_broke_off_whole_lines_stay(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    output = opened(path)
    output.append(lines(1, 2, 3, 4))
    output.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    again = opened(path)
    assert again.done == whole[:cut].count(b"\n")
    again.append(lines(*range(again.done + 1, 5)))
    again.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "tail", [b"\0" * 30, b"\0\n", b"[1]\n", b'{"scores": [1]}\n', b'{"line": 2, "scores": [1]}\n', b'{"line": 3, "sc\n']
)
def test_lines_that_are_no_scores_are_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "out.jsonl"
    good = b'{"line": 1, "scores": [1.0]}\n{"line": 2, "error": "is bad"}\n'
    path.write_bytes(good + tail)
    assert sound_end(path) == (2, len(good))


@pytest.mark.parametrize("part", ["input", "model", "settings"])
def test_another_input_model_or_setting_is_refused(tmp_path: Path, part: str) -> None:
    path = tmp_path / "out.jsonl"
    output = opened(path)
    output.append(lines(1))
    output.close()
    other = msgspec.structs.replace(SCORED_BY, **{part: {"changed": 1}})
    with pytest.raises(ConfigError, match=f"with another {part}; name another file, or add --overwrite"):
        opened(path, other)
    assert path.read_text()
    anew = opened(path, other, overwrite=True)
    assert anew.done == 0
    anew.close()
    assert path.read_text() == ""
    opened(path, other).close()


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"line": 1}\n')
    with pytest.raises(ConfigError, match="exists"):
        opened(path)
    assert path.read_text() == '{"line": 1}\n'


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = opened(path)
    with pytest.raises(ConfigError, match="another process is writing"):
        opened(path)
    output.close()
    opened(path).close()


def test_identities_tell_content(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"a\n\nb")
    identity, count = input_identity(rows)
    assert (identity["bytes"], count) == (4, 3)
    rows.write_bytes(b"a\n\nc")
    assert input_identity(rows)[0] != identity
    before = model_identity(str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert model_identity(str(tmp_path), None) != before
    assert model_identity("owner/name", "main") == {"name": "owner/name", "revision": "main"}
