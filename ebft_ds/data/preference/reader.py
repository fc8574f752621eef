"""Raw preference rows in training order: endless, resumable, read when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ebft_ds.config.sections import DataSection, RewardSection
from ebft_ds.data.preference.by_number import NumberedRows, RowSelection
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.streamed import StreamedRows, is_stream, open_stream
from ebft_ds.data.sources import DataSource, read_rows
from ebft_ds.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import datasets

PreferenceSource: TypeAlias = "DataSource | datasets.IterableDataset | datasets.IterableDatasetDict"

_MEANINGS = {
    "kind": "the way rows are read (streaming)",
    "fingerprint": "the training data",
    "rows": "the number of training rows",
    "held_out": "eval_holdout",
    "seed": "seed",
    "shuffle": "shuffle",
    "shuffle_buffer_size": "shuffle_buffer_size",
}


class PreferenceReader:
    """Rows with random access in a permutation of each epoch; with `streaming`, or from an `IterableDataset`, in shuffled blocks."""

    def __init__(
        self, source: PreferenceSource, *, data: DataSection, reward: RewardSection, seed: int, shuffle: bool, split: str | None
    ) -> None:
        """Reads, parses and encodes no row, so that starting takes as long for a million rows as for ten. Exceptions: JSON-lines files
        are searched for line ends, at disk speed (not with `streaming`), and a .json file that holds an array is parsed whole.

        Raises:
            ConfigError: `eval_holdout` or `max_train_rows` of a stream.
            DataError: a source that is not there, or has no training row.
        """
        self._rows: NumberedRows | StreamedRows
        if reward.streaming or is_stream(source):
            for name, value in (("eval_holdout", data.eval_holdout), ("max_train_rows", data.max_train_rows)):
                if value:
                    raise ConfigError(f"{name} needs rows by number, which a stream has not; leave it out.")
            stream = open_stream(source, split=split, config_name=data.dataset_config)
            self._rows = StreamedRows(stream, seed=seed, shuffle=shuffle, buffer=reward.shuffle_buffer_size)
            return
        table = read_rows(source, split=split, config_name=data.dataset_config, num_proc=data.dataset_num_proc, lazy=True)
        self._rows = NumberedRows(
            table,
            fields=PreferenceFields.of(reward, data),
            seed=seed,
            shuffle=shuffle,
            max_rows=data.max_train_rows,
            holdout=data.eval_holdout,
        )

    @property
    def rows(self) -> int | None:
        """Training rows; None for a stream that was not read to its end yet."""
        return self._rows.rows

    @property
    def rows_per_epoch(self) -> int | None:
        return self._rows.rows

    @property
    def epoch(self) -> float:
        return self._rows.epoch

    @property
    def held_out(self) -> RowSelection | None:
        """The `eval_holdout` rows, for `read_evaluation_rows`; None without."""
        rows = self._rows
        return rows.held_out if isinstance(rows, NumberedRows) and len(rows.held_out) else None

    @property
    def held_out_duplicates(self) -> int:
        """Training rows passed over because their prompt is held out."""
        return self._rows.duplicates

    def take(self, count: int) -> list[tuple[int, Any]]:
        """The next (row number, raw row). Raises `DataError` for a source that fails or has no rows."""
        self._rows.identity()  # reads what a checkpoint compares, once: here, where the caller tells other ranks of a failure
        return self._rows.take(count)

    def look(self, count: int) -> list[tuple[int, Any]]:
        """What `take` gives next, without moving the position: the first rows, before any were taken. At most `count` of them, fewer from
        a source with fewer rows or a stream whose next block has fewer. Errors as `take`.
        """
        return self._rows.look(count)

    def where(self, number: int) -> str:
        """Where the row stands in its source."""
        return self._rows.where(number)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**self._rows.identity(), "progress": self._rows.progress()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises `CheckpointError` if data, seed or order are not those the state was saved with."""
        for key, own in self._rows.identity().items():
            if key not in state or "progress" not in state:
                raise CheckpointError(f"The saved row order has no {key}: the checkpoint is damaged or from another version.")
            if state[key] != own:
                raise CheckpointError(
                    f"The run was saved with other data: {_MEANINGS[key]} was {state[key]}, now it is {own}."
                    " Restore it, or start a new run from the exported model."
                )
        self._rows.restore(state["progress"])
