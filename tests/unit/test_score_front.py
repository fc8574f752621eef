"""The scorer's HTTP side: answers in order, errors that name the row, limits, the key, and how it ends."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import pytest

from ebft_ds.data.rows import BadRow
from ebft_ds.errors import ConfigError, NumericsError
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.score import answer_together
from ebft_ds.trainers.score_front import ScoreFront, Work
from ebft_ds.trainers.score_job import ScoreServer, server_key
from ebft_ds.trainers.score_rounds import GroupIds, ScoreRounds


def encode(row: Any) -> list[GroupIds]:
    """A row's responses are groups of lengths; the score of a response is its length."""
    if not isinstance(row, dict):
        raise BadRow("is not an object")
    return [GroupIds([], [[7] * len(text) for text in row.get("responses", [row.get("response", "")])])]


def lengths(groups: list[GroupIds]) -> list[list[float]]:
    return [[float(len(branch)) for branch in group.branches] for group in groups]


@contextmanager
def running(
    server: ScoreServer | None = None,
    key: str | None = None,
    scale: RewardScale | None = None,
    score: Callable[[list[GroupIds]], list[list[float]]] = lengths,
) -> Iterator[ScoreFront]:
    """A front whose work is done by a thread, as rank 0's loop does it."""
    front = ScoreFront(encode, server or ScoreServer(), key, scale, {"model": "m"})
    end = threading.Event()

    def work() -> None:
        while not end.is_set():
            for request in front.take(8, 0.02):
                try:
                    request.answer.set_result(score(request.groups))
                except NumericsError as error:
                    request.answer.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield front
    finally:
        end.set()
        thread.join()
        front.close()


def ask(url: str, body: Any = None, key: str | None = None) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_rows_get_lists_and_inputs_get_numbers() -> None:
    with running() as front:
        rows = [{"responses": ["a", "bbb"]}, {"responses": ["cc"]}]
        assert ask(f"{front.url}/score", {"rows": rows}) == (200, {"scores": [[1.0, 3.0], [2.0]]})
        assert ask(f"{front.url}/score", {"inputs": [{"prompt": "p", "response": "dddd"}]}) == (200, {"scores": [4.0]})
        assert ask(f"{front.url}/score", {"rows": []}) == (200, {"scores": []})
        assert ask(f"{front.url}/health") == (200, {"status": "ok", "model": "m"})


def test_normalised_scores_come_beside_the_raw_ones() -> None:
    with running(scale=RewardScale(1.0, 2.0)) as front:
        assert ask(f"{front.url}/score", {"inputs": [{"response": "ddd"}]})[1] == {"scores": [3.0], "normalized": [1.0]}


def test_many_requests_at_once_get_their_own_answers() -> None:
    with running() as front, ThreadPoolExecutor(16) as pool:
        sizes = list(range(64))
        found = pool.map(lambda n: ask(f"{front.url}/score", {"inputs": [{"response": "x" * n}] * 3}), sizes)
        assert [answer["scores"] for _, answer in found] == [[float(n)] * 3 for n in sizes]


@pytest.mark.parametrize(
    ("body", "status", "text", "row"),
    [
        (b"{", 400, "not valid JSON", None),
        (b"[" * 100_000, 400, "not valid JSON", None),
        ([1], 400, 'either "rows" or "inputs"', None),
        ({"rows": [], "inputs": []}, 400, 'either "rows" or "inputs"', None),
        ({"rows": 3}, 400, "rows is not a list", None),
        ({"rows": [{"response": "a"}, 5]}, 400, "row 1 is not an object", 1),
        ({"inputs": [{"response": "a"}, {"chosen": "b"}]}, 400, "input 1 has no response", 1),
        ({"rows": [{"response": "a"}] * 5}, 413, "5 rows in one request; at most 4", None),
        ({"rows": [{"response": "a" * 60_000}]}, 413, "", None),
    ],
)
def test_bad_requests_say_what_is_wrong(body: Any, status: int, text: str, row: int | None) -> None:
    with running(ScoreServer(max_rows=4, max_body_mb=0.05 if row is None and text == "" else 1.0)) as front:
        found, answer = ask(f"{front.url}/score", body)
        assert found == status
        assert text in answer["error"]
        assert answer.get("row") == row
        assert ask(f"{front.url}/score", {"inputs": [{"response": "a"}]})[0] == 200


def test_unknown_routes_and_methods_are_json_too() -> None:
    with running() as front:
        assert ask(f"{front.url}/nothing")[0] == 404
        assert ask(f"{front.url}/score")[0] == 405


def test_without_the_key_only_health_answers() -> None:
    with running(key="secret") as front:
        body = {"inputs": [{"response": "a"}]}
        assert ask(f"{front.url}/health")[0] == 200
        for key in (None, "secre", "secret2", "schlüssel".encode().decode("latin-1")):
            assert ask(f"{front.url}/score", body, key)[0] == 401
        assert ask(f"{front.url}/score", body, "secret")[0] == 200


def test_a_failed_scoring_is_answered_and_the_next_one_works() -> None:
    def fails_on_nine(groups: list[GroupIds]) -> list[list[float]]:
        if lengths(groups) == [[9.0]]:
            raise NumericsError("a reward that is not finite")
        return lengths(groups)

    with running(score=fails_on_nine) as front:
        assert ask(f"{front.url}/score", {"inputs": [{"response": "x" * 9}]}) == (500, {"error": "a reward that is not finite"})
        assert ask(f"{front.url}/score", {"inputs": [{"response": "x"}]})[0] == 200


def test_while_it_ends_new_requests_are_refused_and_waiting_ones_are_answered() -> None:
    front = ScoreFront(encode, ScoreServer(), None, None, {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, f"{front.url}/score", {"inputs": [{"response": "abc"}]})
        [work] = front.take(8, 10.0)
        front.refuse()
        assert ask(f"{front.url}/score", {"rows": []})[0] == 503
        assert ask(f"{front.url}/health")[0] == 503
        assert not front.idle
        work.answer.set_result([[3.0]])
        assert waiting.result() == (200, {"scores": [3.0]})
    front.close()
    with pytest.raises(urllib.error.URLError):
        ask(f"{front.url}/health")


def test_a_port_in_use_is_a_clear_error() -> None:
    with running() as front:
        port = int(front.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
            ScoreFront(encode, ScoreServer(port=port), None, None, {})


def test_other_machines_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBFT_SCORE_API_KEY", raising=False)
    assert server_key(ScoreServer()) is None
    with pytest.raises(ConfigError, match="give a key in EBFT_SCORE_API_KEY or --key-file"):
        server_key(ScoreServer(host="0.0.0.0"))
    monkeypatch.setenv("EBFT_SCORE_API_KEY", "secret")
    assert server_key(ScoreServer(host="0.0.0.0")) == "secret"


class Rounds:
    """Scores are lengths; a round with a token 0 has one that is not finite."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def lead(self, groups: list[GroupIds]) -> list[list[float]]:
        self.sizes.append(len(groups))
        if any(0 in branch for group in groups for branch in group.branches):
            raise NumericsError("a reward that is not finite")
        return lengths(groups)


def test_one_bad_request_of_a_round_does_not_spoil_the_others() -> None:
    groups = [[GroupIds([], [[1, 2]])], [GroupIds([], [[0]])], [GroupIds([], [[1]]), GroupIds([], [[1, 2, 3]])]]
    work, rounds = [Work(one) for one in groups], Rounds()
    answer_together(work, cast(ScoreRounds, rounds))
    assert work[0].answer.result() == [[2.0]]
    assert isinstance(work[1].answer.exception(), NumericsError)
    assert work[2].answer.result() == [[1.0], [3.0]]
    assert rounds.sizes == [4, 1, 1, 2]
    alone = Work(groups[0])
    answer_together([alone], cast(ScoreRounds, rounds))
    answer_together([], cast(ScoreRounds, rounds))
    assert alone.answer.result() == [[2.0]]
