"""Reward models on real ZeRO-3 ranks: the new head, checkpoints with a head, adapters, and scores as the library's own classifier's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification

from ebft_ds.collectives import Collectives
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived_reward import derive_reward
from ebft_ds.engine.network import ScoreHead
from ebft_ds.errors import ModelError
from ebft_ds.packing.whole_groups import WholeGroup
from ebft_ds.sync.source import full_numel
from ebft_ds.trainers.engines import row_packer
from ebft_ds.trainers.reward_engine import load_frozen_reward_engine
from ebft_ds.trainers.reward_scoring import score_groups
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.distributed.reward_runs import classifier, gathered, random_groups, reward_config, reward_engine, score_work
from tests.distributed.small import small_model
from tests.unit.small_architectures import small_architecture

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "qwen3_moe")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def reward_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(model, tmp_path_factory.mktemp("classifier"))


def heads_run(collectives: Collectives, model: Path, reward_model: Path, seed: int) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for name, folder, fields in (("new", model, {}), ("known", reward_model, {}), ("lora", model, {"use_peft": True, "lora_r": 2})):
        made = reward_engine(reward_config(folder, seed=seed, **fields), collectives.world_size)
        network = made.engine.network
        trained = {n for n, p in network.named_parameters() if p.requires_grad}
        answer[name] = {
            "head": next(gathered(p) for n, p in network.named_parameters() if ".score." in n and n in trained),
            "partitioned": all(p.numel() == 0 and full_numel(p) > 0 for p in network.parameters()),
            "heads": [type(m) for n, m in network.named_modules() if n.endswith(("score", "score.modules_to_save.default"))],
            "trained": sorted(trained),
        }
    return answer


@pytest.fixture(scope="module")
def heads(model: Path, reward_model: Path) -> RankAnswers:
    return RankAnswers(lambda key: run_ranks(key[0], heads_run, model, reward_model, key[1]))


def test_new_head_is_the_same_for_every_world_size_and_has_the_right_spread(heads: RankAnswers) -> None:
    alone, two = heads[1, 7][0], heads[2, 7]
    for answer in two:
        torch.testing.assert_close(answer["new"]["head"], alone["new"]["head"], rtol=0, atol=0)
        assert answer["new"]["partitioned"]
    head = alone["new"]["head"]
    assert head.shape == (1, 32)
    assert float(head.std()) == pytest.approx(1 / math.sqrt(33), rel=0.4)
    assert not torch.equal(head, heads[1, 8][0]["new"]["head"]), "another seed draws another head"


def test_checkpoint_with_a_head_keeps_it(heads: RankAnswers, reward_model: Path) -> None:
    saved = AutoModelForSequenceClassification.from_pretrained(reward_model).score.weight
    for answer in heads[2, 7]:
        torch.testing.assert_close(answer["known"]["head"], saved.detach(), rtol=0, atol=0)


def test_adapter_trains_its_matrices_and_the_head(heads: RankAnswers) -> None:
    for answer in heads[2, 7]:
        others = [name for name in answer["lora"]["trained"] if "lora_" not in name]
        assert others == ["model.base_model.model.score.modules_to_save.default.weight"]
        torch.testing.assert_close(answer["lora"]["head"], answer["new"]["head"], rtol=0, atol=0)
        assert ScoreHead in answer["lora"]["heads"]


def users_adapter_run(collectives: Collectives, model: Path) -> list[str]:
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    made = reward_engine(reward_config(model, use_peft=True), collectives.world_size, peft_config=adapter)
    assert adapter.modules_to_save is None, "the user's object is left as it is"
    return sorted(n for n, p in made.engine.network.named_parameters() if p.requires_grad and "lora_" not in n)


def test_users_own_adapter_trains_the_head_too(model: Path) -> None:
    assert run_ranks(1, users_adapter_run, model)[0] == ["model.base_model.model.score.modules_to_save.default.weight"]


def wrong_models_run(collectives: Collectives, model: Path, three: Path) -> list[str]:
    messages = []
    for folder, frozen in ((three, False), (three, True), (model, True)):
        config = reward_config(folder)
        try:
            if frozen:
                load_frozen_reward_engine(config, str(folder), build_deepspeed_config(config, derive_reward(config, 1), "feature", 32))
            else:
                reward_engine(config, collectives.world_size)
        except ModelError as error:
            messages.append(str(error))
    return messages


def test_classifiers_of_several_labels_and_frozen_models_without_a_head_are_refused(model: Path, tmp_path: Path) -> None:
    trained, frozen, headless = run_ranks(1, wrong_models_run, model, classifier(model, tmp_path / "three", labels=3))[0]
    assert "classifier of 3 labels" in trained
    assert "classifier of 3 labels" in frozen
    assert "no weight score.weight" in headless


def gathers_after_scoring_run(collectives: Collectives, model: Path) -> int:
    """Training steps record ZeRO-3's trace; a forward without a backward then stops in the middle of it."""
    made = reward_engine(reward_config(model), collectives.world_size)
    work = score_work(random_groups(1, 2), made.packer)
    for step in range(3):
        made.engine.backward(made.engine.scores(work).sum(), last=True)
        made.engine.step(step)
    made.engine.frozen_scores(work)
    return sum(gathered(parameter).numel() for parameter in made.engine.network.parameters())


def test_weights_can_be_gathered_right_after_scoring(model: Path) -> None:
    found = run_ranks(2, gathers_after_scoring_run, model)
    assert found[0] == found[1] > 1000


def architectures_run(collectives: Collectives, folder: Path, groups: list[WholeGroup]) -> dict[str, Any]:
    """Scores of every row style, of the training and of the frozen engine."""
    found: dict[str, Any] = {}
    config = reward_config(folder)
    engine = reward_engine(config, collectives.world_size).engine
    for style in ("auto", "unshared", "padded"):
        packer = row_packer(config.replace(packing=style), engine.network, engine.device, style)
        found[style] = score_groups(engine, packer, groups, collectives, token_budget=128)
        found[f"{style}, trained"] = engine.scores(score_work(groups, packer)).detach()
    frozen = build_deepspeed_config(config, derive_reward(config, collectives.world_size), "feature", 32)
    made = load_frozen_reward_engine(config, str(folder), frozen)
    found["frozen"] = score_groups(made.engine, made.packer, groups, collectives, token_budget=128)
    found["style"] = made.packer.style
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_the_librarys_classifier_on_separate_rows(architecture: str, tmp_path: Path) -> None:
    folder = classifier(small_architecture(tmp_path / "body", architecture, tied=False), tmp_path / "reward")
    groups = random_groups(3, 5, (2, 3))
    expected = library_scores(folder, groups)
    flat = torch.tensor([value for rewards in expected for value in rewards])
    for answer in run_ranks(2, architectures_run, folder, groups):
        assert answer["style"] == "shared"
        for way in ("auto", "unshared", "padded", "frozen"):
            for rewards, wanted in zip(answer[way], expected, strict=True):
                assert rewards == pytest.approx(wanted, abs=1e-4), way
            if way != "frozen":
                torch.testing.assert_close(answer[f"{way}, trained"], flat, rtol=1e-4, atol=1e-4)


def library_scores(folder: Path, groups: list[WholeGroup]) -> list[list[float]]:
    """Right-padded rows, several at a time, pooled by the library at the last token that is no padding."""
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for group in groups:
        sequences = [[*group.prefix_ids, *branch] for branch in group.branches]
        width = max(map(len, sequences))
        pad = network.config.get_text_config().pad_token_id
        ids = torch.tensor([s + [pad] * (width - len(s)) for s in sequences])
        mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
        with torch.no_grad():
            found.append(network(ids, attention_mask=mask).logits[:, 0].tolist())
    return found


def equal_responses_run(collectives: Collectives, folder: Path, groups: list[WholeGroup]) -> list[list[float]]:
    engine = reward_engine(reward_config(folder), collectives.world_size)
    return score_groups(engine.engine, engine.packer, groups, collectives, token_budget=4096)


def test_equal_responses_get_one_reward(reward_model: Path) -> None:
    """In one packed row they are computed at different places, which differ in the last digit: a tie must not be won by place."""
    groups = [WholeGroup(group.prefix_ids, [group.branches[0], group.branches[1], group.branches[0]]) for group in random_groups(5, 12)]
    for first, other, again in run_ranks(1, equal_responses_run, reward_model, groups)[0]:
        assert first == again != other
