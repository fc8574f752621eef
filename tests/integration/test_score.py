"""`ebft-ds score` for real: transformers' own scores from a file and over HTTP, stops, bad rows, and ranks that die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.cli_runs import Finished, all_gone, end_tree, environment, tree, wait_for
from tests.integration.reward_models import make_reward_model, rows, scores_of_transformers, token_ids

ROWS_TO_STOP_IN = 3000
"""One in a round: more rounds than a fast machine does between two looks at the output."""


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward_model") / "model")


def write(path: Path, found: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in found), encoding="utf-8")
    return path


def start(model: Path, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ebft_ds.cli.app", "score", "--model", str(model), *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def run(model: Path, *arguments: Any) -> Finished:
    process = start(model, *arguments)
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        raise AssertionError(f"not done:\n{process.communicate()[0][-4000:]}") from None
    return Finished(process.returncode, output)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def close(found: list[list[float]], wanted: list[list[float]], allowed: float = 1e-4) -> float:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    worst = max(abs(a - b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True))
    assert worst < allowed
    return worst


def test_two_ranks_give_the_scores_of_separate_rows(reward_model: Path, tmp_path: Path) -> None:
    data = rows(25)
    source, output = write(tmp_path / "rows.jsonl", data), tmp_path / "scores.jsonl"
    arguments = ("--input", source, "--output", output, "--processes", 2, "--batch", 10, "--token-budget", 160, "--normalize")
    done = run(reward_model, *arguments)
    assert done.code == 0, done.output[-3000:]
    assert "line 25 of 25" in done.output
    found = read(output)
    assert [line["line"] for line in found] == list(range(1, 26))
    wanted = scores_of_transformers(reward_model, token_ids(reward_model, data))
    close([line["scores"] for line in found], wanted)
    assert found[1]["normalized"] == [(score - 0.5) / 2.0 for score in found[1]["scores"]]
    before = output.read_bytes()
    again = run(reward_model, *arguments)
    assert again.code == 0, again.output[-3000:]
    assert output.read_bytes() == before
    source.write_text(source.read_text() + "\n", encoding="utf-8")
    changed = run(reward_model, *arguments)
    assert changed.code == 2
    assert "with another input" in changed.output
    assert output.read_bytes() == before


@pytest.mark.timeout(900)
def test_a_stopped_run_goes_on_where_it_was(reward_model: Path, tmp_path: Path) -> None:
    data = rows(ROWS_TO_STOP_IN, seed=1)
    source, output, whole = write(tmp_path / "rows.jsonl", data), tmp_path / "scores.jsonl", tmp_path / "whole.jsonl"
    process = start(reward_model, "--input", source, "--output", output, "--batch", 1)
    wait_for(lambda: output.exists() and output.stat().st_size > 500, "scores", process=process)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 7, text[-3000:]
    assert "the same command goes on from there" in text
    scored = read(output)
    assert 0 < len(scored) < len(data)
    output.write_bytes(output.read_bytes()[:-9])
    assert run(reward_model, "--input", source, "--output", output).code == 0
    assert run(reward_model, "--input", source, "--output", whole).code == 0
    found, wanted = read(output), read(whole)
    assert [line["line"] for line in found] == [line["line"] for line in wanted] == list(range(1, ROWS_TO_STOP_IN + 1))
    close([line["scores"] for line in found], [line["scores"] for line in wanted])


def test_a_bad_row_ends_the_run_or_is_written_down(reward_model: Path, tmp_path: Path) -> None:
    good = rows(3)
    source = write(tmp_path / "rows.jsonl", [good[0], "", good[1], '{"prompt": "a"}', "{", good[2]])
    output = tmp_path / "scores.jsonl"
    ended = run(reward_model, "--input", source, "--output", output, "--processes", 2)
    assert ended.code == 3, ended.output[-3000:]
    assert f"line 4 of {source} has no chosen" in ended.output
    assert "--skip-bad-rows" in ended.output
    assert [line["line"] for line in read(output)] == [1, 3]
    done = run(reward_model, "--input", source, "--output", output, "--skip-bad-rows")
    assert done.code == 0, done.output[-3000:]
    found = read(output)
    assert [line["line"] for line in found] == [1, 3, 4, 5, 6]
    assert "has no chosen" in found[2]["error"]
    assert "not valid JSON" in found[3]["error"]
    assert len(found[4]["scores"]) == 3


def test_what_cannot_work_is_said_before_anything_starts(reward_model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", rows(1))
    for code, text, arguments in (
        (2, "give --input FILE and --output FILE, or --serve", ()),
        (3, "there is no such file", ("--input", tmp_path / "none.jsonl", "--output", tmp_path / "out.jsonl")),
        (2, "is the input file", ("--input", source, "--output", source)),
        (2, "give a key in EBFT_SCORE_API_KEY", ("--serve", "--host", "0.0.0.0")),
    ):
        ended = run(reward_model, *arguments)
        assert (ended.code, text in ended.output) == (code, True), ended.output


@contextmanager
def serving(model: Path, log: Path, *arguments: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(URL, process) of a scorer; ended with all its ranks."""
    command = [sys.executable, "-m", "ebft_ds.cli.app", "score", "--model", str(model), "--serve", *map(str, arguments)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        wait_for(lambda: process.poll() is not None or "ready: " in log.read_text(), "ready line")
        assert process.poll() is None, log.read_text()[-3000:]
        yield next(line.removeprefix("ready: ") for line in log.read_text().splitlines() if line.startswith("ready: ")), process
    finally:
        end_tree(process.pid)
        process.wait()


def ask(url: str, body: Any) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/score", json.dumps(body).encode()), timeout=180) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_the_server_gives_the_same_scores_and_ends_cleanly(reward_model: Path, tmp_path: Path) -> None:
    data = rows(24, seed=2)
    wanted = scores_of_transformers(reward_model, token_ids(reward_model, data))
    with serving(reward_model, tmp_path / "log", "--processes", 2) as (url, process), ThreadPoolExecutor(8) as pool:
        close(ask(url, {"rows": data})["scores"], wanted)
        single = [row for row in data if "response" in row or "messages" in row]
        close(
            [ask(url, {"inputs": single})["scores"]],
            [[score for row in scores_of_transformers(reward_model, token_ids(reward_model, single)) for score in row]],
        )
        for found, expected in zip(pool.map(lambda row: ask(url, {"rows": [row]})["scores"], data), wanted, strict=True):
            close(found, [expected])
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, {"rows": [data[0], {"prompt": "a"}]})
        processes = tree(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0, (tmp_path / "log").read_text()[-3000:]
        assert all_gone(processes)


def test_a_rank_that_dies_ends_the_server(reward_model: Path, tmp_path: Path) -> None:
    with serving(reward_model, tmp_path / "log", "--processes", 2) as (url, process):
        processes = tree(process.pid)
        followers = [p for p in processes if "score_rank" in " ".join(p.cmdline()) and p.environ().get("RANK") == "1"]
        assert len(followers) == 1
        followers[0].send_signal(signal.SIGKILL)
        assert process.wait(180) not in (0, None), url
        assert all_gone([p for p in processes if isinstance(p, psutil.Process)])
