"""A reward model as an objective, on two real ZeRO-3 ranks: its rewards are transformers', its inputs those of its training."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ebft_ds.collectives import Collectives
from ebft_ds.config.derived import derive
from ebft_ds.data.preference import RewardEncoder, RewardEncoding
from ebft_ds.data.preference.rows import PreferenceRow
from ebft_ds.data.prompts import load_prompt_dataset
from ebft_ds.errors import ConfigError, ModelError
from ebft_ds.trainers.objectives import distinct_names
from ebft_ds.trainers.reward_objective import RewardModelObjective, read_reward_source, split_group
from ebft_ds.types import Prompt, Rollout, RolloutGroup, TokenSpan
from tests.distributed.engines import make_config
from tests.distributed.ranks import run_ranks
from tests.distributed.reward_folder import make_reward_model

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "what is a lion?"}], "ground_truth": "a big cat"},
    {"prompt": "never asked", "ground_truth": "left out by max_prompt_length " * 40},
    {"prompt": "name a color: ", "ground_truth": "blue"},
    {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two and two?"}], "ground_truth": "four"},
]
COMPLETIONS = [["a big cat", "a fish", "", "a big cat"], ["blue", "red and green", "no", "x"], ["four", "five " * 30, "4", "?"]]
PROMPT_IDS = [0, 2, 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reward_objective")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    keep = make_reward_model(folder / "judge" / "final")
    drop = shutil.copytree(keep, folder / "strict")
    RewardEncoding(max_length=64, truncation_mode="drop", empty_responses="drop").save(drop)
    return {"policy": tiny_model, "data": data, "keep": keep, "drop": drop}


def groups_of(tokenizer: Any) -> list[RolloutGroup]:
    def rollout(text: str) -> Rollout:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Rollout(ids, [-1.0] * len(ids), [TokenSpan(0, len(ids), 0)], "stop")

    return [
        RolloutGroup(Prompt(prompt_id, i, 0, [1], [1]), [rollout(text) for text in texts])
        for i, (prompt_id, texts) in enumerate(zip(PROMPT_IDS, COMPLETIONS, strict=True))
    ]


def score_on_rank(
    collectives: Collectives, folders: dict[str, Path], model: str, packing: str, budget: int
) -> tuple[list[list[float]], list[Any]]:
    config = make_config(
        folders["policy"],
        train_dataset=str(folders["data"]),
        reward_models=[str(folders[model])],
        reward_model_token_budget=budget,
        packing=packing,
        per_device_train_batch_size=4,
    )
    tokenizer = AutoTokenizer.from_pretrained(folders["policy"])
    prompts = load_prompt_dataset(config.data, config.rollout, tokenizer)
    source = read_reward_source(str(folders[model]), config)
    derived = derive(config, collectives.world_size)
    objective = RewardModelObjective.load(source, config, derived, collectives, prompts=prompts, policy_tokenizer=tokenizer)
    groups = groups_of(tokenizer)
    return objective.rewards(groups).tolist(), objective.encode(groups)


def expected_rewards(folder: Path, inputs: list[list[Any]]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [[math.nan if ids is None else float(model(torch.tensor([ids])).logits) for ids in row] for row in inputs]
    return torch.tensor(rows)


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path]) -> Any:
    def scenario(model: str, packing: str = "shared", budget: int = 4096, ranks: int = 2) -> list[Any]:
        return run_ranks(ranks, score_on_rank, folders, model, packing, budget)

    return scenario


def test_rewards_are_those_of_separate_sequences_and_inputs_those_of_training(folders: dict[str, Path], answers: Any) -> None:
    first, second = answers("keep", "shared", 80)  # a budget that long groups must be split for
    assert first == second, "every rank has all rewards"
    rewards, inputs = first
    tokenizer = AutoTokenizer.from_pretrained(folders["keep"])
    policy = AutoTokenizer.from_pretrained(folders["policy"])
    encoder = RewardEncoder(tokenizer, RewardEncoding.load(folders["keep"]))
    for prompt_id, texts, row in zip(PROMPT_IDS, COMPLETIONS, inputs, strict=True):
        for text, ids in zip(texts, row, strict=True):
            said = policy.decode(policy.encode(text, add_special_tokens=False), skip_special_tokens=True)
            training = encoder.encode(PreferenceRow(ROWS[prompt_id]["prompt"], [said, "another answer"]))
            assert list(ids) == training.group[0]
    assert max(len(ids) for row in inputs for ids in row) == 64, "one was cut"
    torch.testing.assert_close(torch.tensor(rewards), expected_rewards(folders["keep"], inputs), rtol=0, atol=1e-4)
    assert rewards[0][0] == rewards[0][3], "equal completions, one reward"
    assert torch.tensor(rewards).std() > 0.05


def test_what_the_recipe_drops_has_no_reward(folders: dict[str, Path], answers: Any) -> None:
    rewards, inputs = answers("drop", "padded")[0]
    missing = [(g, j) for g, row in enumerate(inputs) for j, ids in enumerate(row) if ids is None]
    assert missing == [(0, 2), (2, 1)], "the empty completion and the over-long one"
    torch.testing.assert_close(torch.tensor(rewards), expected_rewards(folders["drop"], inputs), rtol=0, atol=1e-4, equal_nan=True)


def test_models_that_cannot_score_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    config = make_config(folders["policy"])
    with pytest.raises(ModelError, match=r"reward_encoding\.json"):
        read_reward_source(str(folders["policy"]), config)
    with pytest.raises(ModelError, match="does not exist"):
        read_reward_source(str(tmp_path / "missing"), config)
    with pytest.raises(ConfigError, match="below the 64 tokens"):
        read_reward_source(str(folders["keep"]), make_config(folders["policy"], reward_model_token_budget=32))
    headless = shutil.copytree(folders["policy"], tmp_path / "headless")
    RewardEncoding(max_length=64).save(headless)
    with pytest.raises(Exception, match=r"no weight score\.weight: it is no reward model"):
        run_ranks(1, score_on_rank, folders | {"headless": headless}, "headless", "shared", 4096)


def test_names_of_models_and_functions(folders: dict[str, Path]) -> None:
    config = make_config(folders["policy"])
    assert read_reward_source(str(folders["keep"]), config).name == "judge"
    assert read_reward_source(str(folders["drop"]), config).name == "strict"
    assert distinct_names(["judge", "length", "judge", "judge_2", "judge"]) == ["judge", "length", "judge_2", "judge_2_2", "judge_3"]


def test_groups_are_split_only_where_they_must_be() -> None:
    inputs = [(1, 2, 3, 4), (1, 2, 5), (1, 2, 6, 7, 8), (1, 2, 9)]
    assert split_group(inputs, "shared", 100) == [inputs]
    assert split_group(inputs, "shared", 7) == [inputs[:2], inputs[2:]]
    assert split_group(inputs, "padded", 5) == [[one] for one in inputs]
    assert split_group([], "shared", 8) == []
