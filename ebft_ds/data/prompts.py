"""Tokenised prompts with their references, and how they are made from a source of rows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from ebft_ds.config.sections import DataSection, RolloutSection
from ebft_ds.data.chat import require_chat_template, set_chat_template
from ebft_ds.data.encode import EncodedTexts, RowEncoder
from ebft_ds.data.limits import LengthLimits
from ebft_ds.data.load_report import LoadReport
from ebft_ds.data.rows import BadRow, Message, ValidRow, validate_row
from ebft_ds.data.sources import DataSource, RowTable, read_rows
from ebft_ds.data.token_table import TokenTable
from ebft_ds.errors import ConfigError, DataError, ModelError
from ebft_ds.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ENCODE_BATCH = 1024


class EncodedRow(msgspec.Struct, frozen=True):
    """One row for use and display."""

    prompt_id: int
    """Row number in the source, from 0."""
    token_ids: list[int]
    reference_ids: list[int]
    prompt: str | list[Message]
    reference: str


class PromptDataset:
    """Tokenised rows of one source, in source order."""

    def __init__(
        self,
        table: RowTable,
        *,
        prompt_ids: list[int],
        prompts: TokenTable,
        references: TokenTable,
        report: LoadReport,
        prompt_field: str,
        ground_truth_field: str,
        chosen: Sequence[int] | None = None,
    ) -> None:
        self._table = table
        self._prompt_ids = prompt_ids
        self._prompts = prompts
        self._references = references
        self._fields = (prompt_field, ground_truth_field)
        self._chosen: Sequence[int] = range(len(prompt_ids)) if chosen is None else chosen
        self.report = report

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> EncodedRow:
        prompt = self.prompt(index, index=index, epoch=0)
        row = validate_row(self._table.row(prompt.prompt_id), prompt_field=self._fields[0], ground_truth_field=self._fields[1])
        return EncodedRow(prompt.prompt_id, prompt.token_ids, prompt.reference_ids, row.prompt, row.reference)

    def prompt(self, row: int, *, index: int, epoch: int) -> Prompt:
        """Row `row` of this dataset as a prompt at stream position `index`."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} prompts")
        at = self._chosen[row]
        return Prompt(
            prompt_id=self._prompt_ids[at],
            index=index,
            epoch=epoch,
            token_ids=self._prompts[at],
            reference_ids=self._references[at],
        )

    def source_prompt(self, prompt_id: int) -> str | list[Message]:
        """The prompt as it stands in row `prompt_id` of the source, checked: what another model's tokenizer encodes."""
        return validate_row(self._table.row(prompt_id), prompt_field=self._fields[0], ground_truth_field=self._fields[1]).prompt

    def where(self, index: int) -> str:
        """Where the row stands in its source."""
        return self._table.where(self._prompt_ids[self._chosen[index]])

    @property
    def is_chat(self) -> bool:
        """Does any prompt go through the chat template?"""
        return self.report.chat_rows > 0

    @property
    def max_token_id(self) -> int:
        return max(self._prompts.largest(), self._references.largest())

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, reference) tokens of each row."""
        return [(self._prompts.length(at), self._references.length(at)) for at in self._chosen]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over row numbers and token ids in order: changes with the data, the tokenizer, the template and the limits."""
        digest = hashlib.sha256()
        for at in self._chosen:
            prompt, reference = self._prompts.content(at), self._references.content(at)
            digest.update(f"{self._prompt_ids[at]} {len(prompt)} {len(reference)} ".encode())
            digest.update(prompt)
            digest.update(reference)
        return digest.hexdigest()

    def subset(self, rows: Sequence[int], report: LoadReport) -> PromptDataset:
        """The given rows, in the given order, over the same tables."""
        return PromptDataset(
            self._table,
            prompt_ids=self._prompt_ids,
            prompts=self._prompts,
            references=self._references,
            report=report,
            prompt_field=self._fields[0],
            ground_truth_field=self._fields[1],
            chosen=[self._chosen[row] for row in rows],
        )


def load_prompt_dataset(
    data: DataSection,
    rollout: RolloutSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    source: DataSource | None = None,
    split: str | None = None,
    max_rows: int | None = None,
) -> PromptDataset:
    """Read, check and tokenise `source` (default: `train_dataset`), its first `max_rows` rows.

    Bad rows raise `DataError` or are counted (`bad_rows`), over-long ones are counted or raise (`overlong_prompts`); nothing is
    cut. Replaces the tokenizer's template if the section sets one. Raises `DataError` if no row is usable.
    """
    chosen_source = data.train_dataset if source is None else source
    if chosen_source is None:
        raise ConfigError("No training data: set train_dataset.")
    set_chat_template(tokenizer, data.chat_template)
    table = read_rows(chosen_source, split=split, config_name=data.dataset_config, num_proc=data.dataset_num_proc)
    loader = _Loader(table, data, LengthLimits.of(data, rollout), tokenizer)
    count = len(table) if max_rows is None else min(max_rows, len(table))
    for start in range(0, count, ENCODE_BATCH):
        loader.load(range(start, min(start + ENCODE_BATCH, count)))
    dataset = loader.finish()
    logger.info("%s", dataset.report.summary())
    return dataset


class _Loader:
    """Accumulates usable rows batch by batch."""

    def __init__(self, table: RowTable, data: DataSection, limits: LengthLimits, tokenizer: PreTrainedTokenizerBase) -> None:
        self._table = table
        self._data = data
        self._limits = limits
        self._tokenizer = tokenizer
        self._encoder = RowEncoder(
            tokenizer,
            system_prompt=data.system_prompt,
            chat_template_kwargs=data.chat_template_kwargs,
            close_references=data.reference_end == "auto",
        )
        self._prompt_ids: list[int] = []
        self._prompts, self._references = TokenTable(), TokenTable()
        self._report = LoadReport(table.name)

    def load(self, numbers: range) -> None:
        valid: list[tuple[int, ValidRow]] = []
        for number in numbers:
            self._report.rows += 1
            try:
                row = validate_row(
                    self._table.row(number), prompt_field=self._data.prompt_field, ground_truth_field=self._data.ground_truth_field
                )
            except BadRow as problem:
                self._bad(number, problem)
                continue
            if row.is_chat:
                require_chat_template(self._tokenizer, self._table.where(number))
            valid.append((number, row))
        for (number, row), encoded in zip(valid, self._encoder.encode([row for _, row in valid]), strict=True):
            if isinstance(encoded, BadRow):
                self._bad(number, encoded)
            elif self._fits(number, encoded):
                self._keep(number, row, encoded)

    def _keep(self, number: int, row: ValidRow, encoded: EncodedTexts) -> None:
        self._prompt_ids.append(number)
        self._prompts.append(encoded.token_ids)
        self._references.append(encoded.reference_ids)
        self._report.usable += 1
        self._report.chat_rows += row.is_chat
        self._report.remaining_turns += row.has_remaining_turns

    def _bad(self, number: int, problem: BadRow) -> None:
        message = f"{self._table.where(number)} {problem}"
        if self._data.bad_rows == "error":
            raise DataError(f"{message}. Correct it, or set bad_rows: skip.")
        self._report.bad_rows += 1
        self._report.first_bad = self._report.first_bad or message

    def _fits(self, number: int, encoded: EncodedTexts) -> bool:
        prompt, reference, limits = len(encoded.token_ids), len(encoded.reference_ids), self._limits
        if prompt > limits.prompt:
            problem = f"has a prompt of {prompt} tokens, over max_prompt_length {limits.prompt}"
        elif reference > limits.reference:
            problem = f"has a reference of {reference} tokens, over max_reference_length {limits.reference}"
        elif prompt + reference > limits.total:
            problem = f"has {prompt} + {reference} tokens of prompt and reference, over max_seq_length {limits.total}"
        else:
            return True
        message = f"{self._table.where(number)} {problem}"
        if self._data.overlong_prompts == "error":
            raise DataError(f"{message}. Raise the limit, shorten the row, or set overlong_prompts: drop.")
        self._report.overlong_prompts += prompt > limits.prompt
        self._report.overlong_references += prompt <= limits.prompt
        self._report.first_overlong = self._report.first_overlong or message
        return False

    def finish(self) -> PromptDataset:
        report = self._report
        if not report.usable:
            raise DataError(f"No usable row. {report.summary()}.")
        if report.remaining_turns:
            logger.warning("%s: remaining_turns of %d rows ignored (single-turn training)", report.source, report.remaining_turns)
        if self._data.system_prompt is not None and report.chat_rows < report.usable:
            logger.warning("%s: system_prompt does not apply to %d plain prompts", report.source, report.usable - report.chat_rows)
        return PromptDataset(
            self._table,
            prompt_ids=self._prompt_ids,
            prompts=self._prompts,
            references=self._references,
            report=report,
            prompt_field=self._data.prompt_field,
            ground_truth_field=self._data.ground_truth_field,
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises `ModelError` if the tokenizer can produce an id that the model's embedding (`vocab_size` rows) does not have."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ModelError(
            f"The tokenizer does not fit the model: token {token!r} has id {largest}, the model's vocabulary ends at {vocab_size - 1}."
            " Use the model's own tokenizer, or resize its embeddings and save the model first."
        )
