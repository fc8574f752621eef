"""A reward model as an objective of EBFT: sharded in a frozen engine of its own, scored in lockstep and packed as features are.

Its input is made as in its own training: by its tokenizer and its `reward_encoding.json`, from the prompt as the dataset's row has it and
the completion as text. Every completion is encoded by itself, so that its reward does not depend on its siblings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from ebft_ds.collectives import Collectives
from ebft_ds.config import RecipeConfig
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived import DerivedNumbers
from ebft_ds.config.model_facts import read_model_facts
from ebft_ds.data.preference import RewardEncoder, RewardEncoding
from ebft_ds.data.preference.truncate import common_prefix
from ebft_ds.data.preflight import load_tokenizer
from ebft_ds.data.prompts import PromptDataset
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.packing.rows import RowStyle
from ebft_ds.packing.whole_groups import WholeGroup
from ebft_ds.trainers.inputs import agree
from ebft_ds.trainers.reward_engine import RewardEngine, load_frozen_reward_engine
from ebft_ds.trainers.reward_scoring import score_groups
from ebft_ds.types import RolloutGroup

logger = logging.getLogger(__name__)

ENCODING_FILE = "reward_encoding.json"
FINAL_FOLDER = "final"
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class RewardModelSource:
    """A reward model on disk, with what its input is made by."""

    model: str
    """Folder or hub name."""
    tokenizer: PreTrainedTokenizerBase
    encoding: RewardEncoding
    token_budget: int

    @property
    def name(self) -> str:
        """In metrics and messages: the folder's name; of an export `RUN/final` the run's."""
        path = Path(self.model)
        return path.parent.name if path.name == FINAL_FOLDER and path.parent.name else path.name


def read_reward_source(model: str, config: RecipeConfig) -> RewardModelSource:
    """Not collective, and cheap: no weights are read.

    Raises:
        ModelError: no such model, no tokenizer, or no readable reward_encoding.json.
        ConfigError: a token budget that the model's longest input does not fit into.
    """
    read_model_facts(model)
    encoding = RewardEncoding.load(encoding_folder(model))
    budget = config.loss.reward_model_token_budget or config.method.scoring_token_budget
    if budget < encoding.max_length:
        raise ConfigError(
            f"reward_model_token_budget (default scoring_token_budget) is {budget}, below the {encoding.max_length} tokens that an input "
            f"of {model} may have; raise it"
        )
    tokenizer = load_tokenizer(model, None, config.model.trust_remote_code)
    return RewardModelSource(model, tokenizer, encoding, budget)


def encoding_folder(model: str) -> Path:
    """Where a model's reward_encoding.json lies."""
    if Path(model).is_dir():
        return Path(model)
    found = cached_file(model, ENCODING_FILE, _raise_exceptions_for_missing_entries=False)
    return Path(found).parent if found is not None else Path(model)


class RewardModelObjective:
    """Rewards of completions under one reward model."""

    def __init__(
        self,
        source: RewardModelSource,
        reward: RewardEngine,
        collectives: Collectives,
        *,
        prompts: PromptDataset,
        policy_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """`prompts`: the rows that the groups' prompts come from. `policy_tokenizer`: decodes completions."""
        self.source = source
        self._reward = reward
        self._collectives = collectives
        self._prompts = prompts
        self._decode = policy_tokenizer.decode
        encoding = source.encoding
        # `drop` leaves an over-long completion out instead of ending the run, so its length is seen here first.
        self._drops = encoding.truncation_mode == "drop"
        self._encoder = RewardEncoder(
            source.tokenizer, msgspec.structs.replace(encoding, max_length=_NO_LIMIT) if self._drops else encoding
        )

    @classmethod
    def load(
        cls,
        source: RewardModelSource,
        config: RecipeConfig,
        derived: DerivedNumbers,
        collectives: Collectives,
        *,
        prompts: PromptDataset,
        policy_tokenizer: PreTrainedTokenizerBase,
    ) -> RewardModelObjective:
        """Collective. ModelError: a model without a head, or with several labels."""
        facts = read_model_facts(source.model)
        deepspeed_config = build_deepspeed_config(config, derived, "feature", facts.hidden_size or None if facts is not None else None)
        reward = load_frozen_reward_engine(config, source.model, deepspeed_config)
        return cls(source, reward, collectives, prompts=prompts, policy_tokenizer=policy_tokenizer)

    def rewards(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """Collective: float32 [G, n] on every rank, as the model gives them. NaN for a completion that the encoding leaves out: empty
        or over-long where it says `drop`.

        Raises:
            DataError (PeerError elsewhere): an input that cannot be encoded, naming the prompt.
            NumericsError: a reward that is not finite.
        """
        encoded = self.encode(groups)
        style, parts, members = self._reward.packer.style, list[WholeGroup](), list[tuple[int, list[tuple[int, ...]]]]()
        for g, inputs in enumerate(encoded):
            # Equal completions share one reward: two forwards of the same tokens may differ by rounding.
            for part in split_group(list(dict.fromkeys(ids for ids in inputs if ids is not None)), style, self.source.token_budget):
                prefix = common_prefix(part)
                parts.append(WholeGroup(part[0][:prefix], [ids[prefix:] for ids in part]))
                members.append((g, part))
        found: list[dict[tuple[int, ...], float]] = [{} for _ in groups]
        scores = score_groups(self._reward.engine, self._reward.packer, parts, self._collectives, token_budget=self.source.token_budget)
        for (g, part), values in zip(members, scores, strict=True):
            found[g].update(zip(part, values, strict=True))
        return torch.tensor([[math.nan if ids is None else found[g][ids] for ids in inputs] for g, inputs in enumerate(encoded)])

    def encode(self, groups: Sequence[RolloutGroup]) -> list[list[tuple[int, ...] | None]]:
        """Collective: the model's input of every completion, None for one that is left out. Each rank encodes a share."""
        rank, ranks = self._collectives.rank, self._collectives.world_size
        own = agree(self._collectives, lambda: [(g, self._encode(groups[g])) for g in range(rank, len(groups), ranks)])
        inputs: list[list[tuple[int, ...] | None]] = [[] for _ in groups]
        for share in self._collectives.all_gather(own):
            for g, completions in share:
                inputs[g] = [None if ids is None else tuple(ids) for ids in completions]
        return inputs

    def _encode(self, group: RolloutGroup) -> list[list[int] | None]:
        encoding, prompt_id = self.source.encoding, group.prompt.prompt_id
        prompt = self._prompts.source_prompt(prompt_id)
        inputs: list[list[int] | None] = []
        for rollout in group.rollouts:
            text: str = self._decode(rollout.token_ids, skip_special_tokens=True)
            if encoding.empty_responses == "drop" and not text.strip():
                inputs.append(None)
                continue
            try:
                ids = self._encoder.encode_one(prompt, text)
            except DataError as error:
                raise DataError(f"reward model {self.source.name}, prompt {prompt_id}: {error}") from error
            inputs.append(None if self._drops and len(ids) > encoding.max_length else ids)
        return inputs


def split_group(inputs: Sequence[tuple[int, ...]], style: RowStyle, budget: int) -> list[list[tuple[int, ...]]]:
    """A prompt's inputs in parts that fit into one forward of `budget` tokens each, as few as their order allows."""
    parts: list[list[tuple[int, ...]]] = []
    for ids in inputs:
        wider = [*parts[-1], ids] if parts else [ids]
        prefix = common_prefix(wider)
        if parts and sum(WholeGroup(ids[:prefix], [other[prefix:] for other in wider]).tokens(style)) <= budget:
            parts[-1] = wider
        else:
            parts.append([ids])
    return parts
