"""Checks of gpu_check.py that concern reward models."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.gpu_report import close, need
from tools.random_model import make_random_model

GROUPS = [([5, 9, 14, 22, 7, 31], [[8, 3, 44], [12], [6, 6, 19, 2]]), ([90, 41], [[17, 33, 5], [23]])]


def reward_model(model: Path, dtype: str) -> str:
    """A frozen reward model on a GPU gives packed groups the scores of separate sequences on the CPU, and a trained one takes a step."""
    need("deepspeed")
    from transformers import AutoModelForSequenceClassification

    from ebft_ds.config import RewardConfig
    from ebft_ds.config.deepspeed import build_deepspeed_config
    from ebft_ds.config.derived_reward import derive_reward
    from ebft_ds.engine.build import init_distributed
    from ebft_ds.engine.network import ScoreWork
    from ebft_ds.packing.whole_groups import WholeGroup, build_group_rows
    from ebft_ds.rewards.preference_loss import PreferenceLoss
    from ebft_ds.trainers.reward_engine import build_reward_engine, load_frozen_reward_engine
    from ebft_ds.trainers.reward_scoring import score_groups

    collectives = init_distributed(120.0)
    folder = make_random_model(model.parent / f"reward_{dtype}", head_dim=64, num_layers=2, initializer_range=0.1)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    plain.save_pretrained(folder)
    with torch.no_grad():
        wanted = [float(plain(torch.tensor([[*prompt, *ids]])).logits) for prompt, branches in GROUPS for ids in branches]
    config = RewardConfig(model_name_or_path=str(folder), dtype=dtype, learning_rate=1e-3, max_steps=1)
    numbers = derive_reward(config, 1)
    hidden = plain.config.hidden_size
    frozen = load_frozen_reward_engine(config, str(folder), build_deepspeed_config(config, numbers, "feature", hidden))
    groups = [WholeGroup(prompt, branches) for prompt, branches in GROUPS]
    found = score_groups(frozen.engine, frozen.packer, groups, collectives, token_budget=256)
    report = close(torch.tensor([score for group in found for score in group]), torch.tensor(wanted), 2e-3 if dtype == "float32" else 0.1)
    trained = build_reward_engine(config, numbers, hidden_size=hidden, peft_config=None, optimizer=None)
    rows = build_group_rows(groups, trained.packer, device=trained.engine.device)
    loss, terms = PreferenceLoss().sums(trained.engine.scores(ScoreWork(rows.rows, rows.ends)), rows.counts, [0.0] * 2, [1.0] * 2)
    trained.engine.backward(loss / terms, last=True)
    norm, _ = trained.engine.step(0)
    assert norm > 0
    return report
