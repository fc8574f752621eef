"""Sample completions: the file keeps any text, the table shows it harmlessly."""

from __future__ import annotations

import io
import json
import unicodedata
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ebft_ds.errors import DataError
from ebft_ds.monitor import SampleLog, SampleRow, read_samples, render_table
from ebft_ds.monitor.visible_text import visible

ROW = SampleRow(
    step=3,
    prompt_id=7,
    index=0,
    prompt="2+2",
    completion="4",
    reference="four",
    reward=0.5,
    alignment=1.25,
    diversity=None,
    advantage=-0.125,
    length=2,
    finish_reason="stop",
    version=3,
)


def changed(**values: object) -> SampleRow:
    return msgspec.structs.replace(ROW, **values)


def shown(*rows: SampleRow, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render_table(rows, title="step [3]"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(text=st.text(st.characters()), reward=st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_comes_back(tmp_path: Path, text: str, reward: float) -> None:
    path = tmp_path / "samples.jsonl"
    path.unlink(missing_ok=True)
    row = changed(completion=text, reward=reward)
    log = SampleLog(path)
    log.append([row, ROW])
    log.close()
    assert len(path.read_bytes().splitlines()) == 2
    assert read_samples(path) == [row, ROW]


def test_nan_and_lone_surrogates_stay_valid_json(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    log.append([changed(reward=float("nan"), completion="a\ud800b")])
    log.close()
    value = json.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert value["reward"] is None
    assert read_samples(tmp_path / "samples.jsonl")[0].reward is None


def test_resume_drops_later_rows_and_keeps_a_steps_several_rows(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "samples.jsonl"
    log = SampleLog(path, start_step=0)
    log.append([changed(step=step, index=index) for step in (10, 20, 30) for index in (0, 1)])
    log.close()
    log = SampleLog(path, start_step=20)
    log.append([changed(step=30, index=5)])
    log.close()
    assert [(row.step, row.index) for row in read_samples(path)] == [(10, 0), (10, 1), (20, 0), (20, 1), (30, 5)]
    assert [row.index for row in read_samples(path, step=10)] == [0, 1]
    assert [row.step for row in read_samples(path, limit=3)] == [10, 10, 20]
    assert len(path.with_name("samples.replaced.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}'])
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path)
    log.append([ROW])
    log.close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl, line 2"):
        read_samples(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl")


def test_markup_in_model_text_is_shown_not_obeyed() -> None:
    output = shown(changed(completion="[bold red]x[/bold red] [/nothing] :smile:", prompt="[link=http://x]y"))
    assert "[bold red]x[/bold" in output
    assert "[link=http://x]y" in output
    assert ":smile:" in output
    assert "step [3]" in output


def test_control_characters_cannot_reach_the_terminal() -> None:
    nasty = "a\x1b[2Jb\x07\rc\nd\te\u202ef\x9bg\x7f"
    output = shown(changed(completion=nasty))
    assert "\x1b" not in output.replace("\x1b[0m", "")
    assert not set("\x07\r\t\u202e\x9b\x7f") & set(output)
    assert visible(nasty) == "a␛[2Jb␇␍c↵d⇥e<U+202E>f<U+009B>g␡"


@given(st.text(st.characters()), st.integers(1, 20))
def test_visible_text_is_one_harmless_line(text: str, limit: int) -> None:
    result = visible(text)
    assert not [c for c in result if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    assert len(result.splitlines()) <= 1
    if len(text) > limit:
        assert visible(text, limit) == visible(text[: limit - 1]) + "…"
    else:
        assert visible(text, limit) == result


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_table_keeps_to_the_width(width: int) -> None:
    long = changed(completion="word " * 500, prompt="x" * 1000)
    lines = shown(long, ROW, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 250


def test_scores_are_shown() -> None:
    output = shown(ROW)
    for cell in ("0.500", "1.250", "-0.125", "stop"):
        assert cell in output
