"""Scores of a file's rows, line by line, into another file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebft_ds.data.preference import RewardEncoding
from ebft_ds.data.rows import BadRow
from ebft_ds.errors import DataError, NumericsError, Preempted
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.score_job import ScoreFile, ScoreJob
from ebft_ds.trainers.score_output import ScoredBy, ScoreOutput, input_identity, model_identity
from ebft_ds.trainers.score_progress import ScoreProgress
from ebft_ds.trainers.score_rounds import GroupIds, ScoreRounds
from ebft_ds.trainers.score_rows import ScoreEncoder


@dataclass(frozen=True)
class OpenFiles:
    """Rank 0's files."""

    input: Path
    lines: int
    output: ScoreOutput
    skip_bad_rows: bool


def open_files(job: ScoreJob, work: ScoreFile, encoding: RewardEncoding) -> OpenFiles:
    """Errors: DataError for an unreadable input, ConfigError as of ScoreOutput."""
    source = Path(work.input)
    identity, lines = input_identity(source)
    settings = {"dtype": job.dtype, "normalize": job.normalize, "max_length": encoding.max_length}
    scored_by = ScoredBy(identity, model_identity(job.model, job.revision), settings)
    return OpenFiles(source, lines, ScoreOutput(Path(work.output), scored_by, overwrite=work.overwrite), work.skip_bad_rows)


@dataclass(frozen=True)
class _Line:
    number: int
    groups: list[GroupIds]
    problem: str | None = None
    """Why it cannot be scored."""


class FileScores:
    """The scoring of one file on rank 0."""

    def __init__(self, files: OpenFiles, encoder: ScoreEncoder, rounds: ScoreRounds, scale: RewardScale | None, *, batch: int) -> None:
        """`scale`: lines have normalised scores beside the raw ones. `batch`: lines between two writes."""
        self._files, self._encoder, self._rounds = files, encoder, rounds
        self._scale, self._batch = scale, batch
        self._done = files.output.done

    def run(self) -> None:
        """Everything that is not in the output yet.

        Raises:
            DataError: a line that cannot be scored, after those before it have been written.
            NumericsError: a reward that is not finite.
            Preempted: a stop signal came.
        """
        files = self._files
        with ScoreProgress(files.lines, self._done) as progress:
            if self._done:
                progress.note(f"going on after line {self._done} of {files.lines}")
            for batch in self._batches():
                if self._rounds.stop_wanted:
                    raise Preempted(f"stopped before line {batch[0].number} of {files.lines}; the same command goes on from there")
                bad = next((line for line in batch if line.problem is not None), None)
                if bad is not None and not files.skip_bad_rows:
                    self._write([line for line in batch if line.number < bad.number])
                    raise DataError(f"line {bad.number} of {files.input} {bad.problem}; correct it, or add --skip-bad-rows")
                self._write(batch)
                progress.update(batch[-1].number)

    def _write(self, batch: list[_Line]) -> None:
        groups = [group for line in batch for group in line.groups]
        try:
            rewards = iter(self._rounds.lead(groups))
        except NumericsError as error:
            raise NumericsError(f"lines {batch[0].number} to {batch[-1].number} of {self._files.input}: {error}") from error
        self._files.output.append([self._answer(line, rewards) for line in batch])

    def _answer(self, line: _Line, rewards: Iterator[list[float]]) -> dict[str, Any]:
        if line.problem is not None:
            return {"line": line.number, "error": line.problem}
        scores = [score for _ in line.groups for score in next(rewards)]
        answer = {"line": line.number, "scores": scores}
        if self._scale is not None:
            answer["normalized"] = [self._scale.normalized(score) for score in scores]
        return answer

    def _batches(self) -> Iterator[list[_Line]]:
        """Lines that are not blank and not done yet, some at a time."""
        batch: list[_Line] = []
        with self._files.input.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if number <= self._done or not text.strip():
                    continue
                batch.append(self._encoded(number, text))
                if len(batch) == self._batch:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def _encoded(self, number: int, text: bytes) -> _Line:
        try:
            return _Line(number, self._encoder.encode(json.loads(text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text)))
        except BadRow as error:
            return _Line(number, [], str(error))
        except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
            return _Line(number, [], f"is not valid JSON: {error}")
