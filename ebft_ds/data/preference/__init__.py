"""Preference rows: from sources to token ids, for training, evaluating and serving reward models."""

from __future__ import annotations

from ebft_ds.data.preference.batches import rows_of_batch
from ebft_ds.data.preference.by_number import RowSelection
from ebft_ds.data.preference.collator import RewardCollator
from ebft_ds.data.preference.collect import CollectFunction, grain_collect_function, tfds_collect_function
from ebft_ds.data.preference.counts import EncodingCounts
from ebft_ds.data.preference.encode import EncodedResponses, RewardEncoder, Skipped, encode_for_reward
from ebft_ds.data.preference.evaluation import read_evaluation_rows
from ebft_ds.data.preference.evaluation_rows import EvaluationRows
from ebft_ds.data.preference.feed import PreferenceFeed
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.reader import PreferenceReader, PreferenceSource
from ebft_ds.data.preference.recipe import RewardEncoding
from ebft_ds.data.preference.rows import PreferenceRow, validate_preference_row

__all__ = [
    "CollectFunction",
    "EncodedResponses",
    "EncodingCounts",
    "EvaluationRows",
    "PreferenceFeed",
    "PreferenceFields",
    "PreferenceReader",
    "PreferenceRow",
    "PreferenceSource",
    "RewardCollator",
    "RewardEncoder",
    "RewardEncoding",
    "RowSelection",
    "Skipped",
    "encode_for_reward",
    "grain_collect_function",
    "read_evaluation_rows",
    "rows_of_batch",
    "tfds_collect_function",
    "validate_preference_row",
]
