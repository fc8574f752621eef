"""The EBFT reward and its advantages against numbers of the public implementations and float64 recomputations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from ebft_ds.features import unit_normalize
from ebft_ds.policy import group_advantages
from ebft_ds.rewards import FeatureRewards
from ebft_ds.rewards import group_feature_rewards as unchecked_rewards

group_feature_rewards = jaxtyped(typechecker=beartype)(unchecked_rewards)

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "ebft_vectors.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in VECTORS["cases"]}
WITH_EXACT = [name for name, case in CASES.items() if "exact" in case]


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def score(case: dict[str, Any], whitening: str | None, *, unit: bool = False) -> FeatureRewards:
    completions, references = f64([case["gen"]]), f64([case["gt"]])
    if unit:
        completions, references = unit_normalize(completions), unit_normalize(references)
    return group_feature_rewards(
        completions, references, alignment_coef=case["alignment_coef"], diversity_coef=case["diversity_coef"], whitening=whitening
    )


@pytest.mark.parametrize("name", WITH_EXACT)
def test_exact_values(name: str) -> None:
    case = CASES[name]
    # The exact values normalise before the reward, as pool_features does, and whiten what was given.
    scored = score(case, "feature" if case["whitening"] else None, unit=not case["whitening"])
    exact = case["exact"]
    close = {"rtol": 0.0, "atol": 1e-11}
    torch.testing.assert_close(scored.alignment, f64([exact["alignment_x2"]]), **close)
    torch.testing.assert_close(scored.diversity, f64([exact["diversity_x2"]]), **close)
    torch.testing.assert_close(scored.reward, f64([exact["reward"]]), **close)
    torch.testing.assert_close(group_advantages(scored), f64([exact["unbiased_rloo_advantage"]]), **close)
    torch.testing.assert_close(group_advantages(scored, estimator="rloo"), f64([exact["naive_rloo_advantage"]]), **close)


@pytest.mark.parametrize("name", [name for name in WITH_EXACT if CASES[name]["whitening"]])
def test_whitening_report(name: str) -> None:
    case = CASES[name]
    scored = score(case, "feature")
    kept = [s / case["exact"]["singular_values"][0] for s in case["exact"]["singular_values"] if s > 1e-10]
    torch.testing.assert_close(scored.whitening_kept_ratio, f64([kept[-1]]), rtol=1e-10, atol=0.0)
    assert scored.gram_identity.tolist() == [len(kept) == len(case["gen"])]


@pytest.mark.parametrize("name", list(CASES))
def test_sample_whitening_and_plain_values_are_the_authors(name: str) -> None:
    case = CASES[name]
    authors = case["authors"]
    scored = score(case, "sample" if case["whitening"] else None)
    # The authors' whitening runs in float32 on Gram matrices.
    close = {"rtol": 0.0, "atol": 1e-5 if case["whitening"] else 1e-12}
    torch.testing.assert_close(scored.alignment, f64([authors["alignment_x2"]]), **close)
    torch.testing.assert_close(scored.diversity, f64([authors["diversity_x2"]]), **close)
    if "reward" in authors:
        torch.testing.assert_close(scored.reward, f64([authors["reward"]]), **close)
        torch.testing.assert_close(group_advantages(scored), f64([authors["rloo_advantage"]]), **close)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "cfm_loss" in case])
def test_cfm_loss_is_of_unwhitened_unit_features(name: str) -> None:
    case = CASES[name]
    for whitening in (None, "feature", "sample"):
        torch.testing.assert_close(score(case, whitening).cfm_loss, f64([case["cfm_loss"]]), rtol=0.0, atol=1e-12)


def test_two_groups_do_not_mix() -> None:
    data = VECTORS["two_groups"]
    completions = f64(data["gen"]).view(2, data["n"], -1)
    scored = group_feature_rewards(completions, completions[:, 0])
    torch.testing.assert_close(scored.diversity / 2, f64(data["diversity_raw"]).view(2, -1), rtol=0.0, atol=1e-12)
