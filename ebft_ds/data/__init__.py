"""From files to tokenised prompts in a resumable order."""

from __future__ import annotations

from ebft_ds.data.adaptive import completion_budget
from ebft_ds.data.chat import end_of_turn_id, set_chat_template, stop_token_ids
from ebft_ds.data.load_report import LoadReport
from ebft_ds.data.prompts import EncodedRow, PromptDataset, check_vocabulary, load_prompt_dataset
from ebft_ds.data.requests import rollout_request, sampling_spec
from ebft_ds.data.sources import DataSource
from ebft_ds.data.split import TrainAndEval, eval_prompts, load_train_and_eval, split_holdout
from ebft_ds.data.stream import PromptStream

__all__ = [
    "DataSource",
    "EncodedRow",
    "LoadReport",
    "PromptDataset",
    "PromptStream",
    "TrainAndEval",
    "check_vocabulary",
    "completion_budget",
    "end_of_turn_id",
    "eval_prompts",
    "load_prompt_dataset",
    "load_train_and_eval",
    "rollout_request",
    "sampling_spec",
    "set_chat_template",
    "split_holdout",
    "stop_token_ids",
]
