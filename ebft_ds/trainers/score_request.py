"""The body of a request to the scorer, and the body of its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from ebft_ds.trainers.reward_evaluation import RewardScale


class BadRequest(Exception):
    """A request that gets an error: its HTTP status, and the row that is to blame."""

    def __init__(self, status: int, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.status, self.row = status, row


class RowsRequest(msgspec.Struct, frozen=True):
    """Rows to be scored."""

    rows: list[Any]
    flat: bool
    """They came as `inputs`, which hold one response each: the answer has a number for each, not a list."""

    def answer(self, scores: list[list[float]], scale: RewardScale | None) -> dict[str, Any]:
        """`scores`: of every row's responses, in their order."""
        found: dict[str, Any] = {"scores": self._shaped(scores)}
        if scale is not None:
            found["normalized"] = self._shaped([[scale.normalized(score) for score in row] for row in scores])
        return found

    def _shaped(self, values: list[list[float]]) -> list[Any]:
        return [value for [value] in values] if self.flat else values


def read_request(body: bytes, max_rows: int) -> RowsRequest:
    """`{"rows": [row, ...]}` or `{"inputs": [{"prompt": ..., "response": ...}, ...]}`; the rows themselves are not looked into.

    Raises:
        BadRequest: anything else, and more than `max_rows`.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(400, f"the body is not valid JSON: {error}") from None
    names = sorted(content) if isinstance(content, dict) else []
    if names not in (["rows"], ["inputs"]):
        raise BadRequest(400, 'the body must be an object with either "rows" or "inputs", a list')
    rows = content[names[0]]
    if not isinstance(rows, list):
        raise BadRequest(400, f"{names[0]} is not a list")
    if len(rows) > max_rows:
        raise BadRequest(413, f"{len(rows)} rows in one request; at most {max_rows} (--max-rows)")
    flat = names == ["inputs"]
    for i, row in enumerate(rows if flat else ()):
        if not isinstance(row, dict) or (row.get("response") is None and row.get("messages") is None):
            raise BadRequest(400, f"input {i} has no response: inputs hold prompt and response, or messages; other rows go into rows", i)
    return RowsRequest(rows, flat)
