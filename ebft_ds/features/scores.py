"""From a group's features to its rewards on one rank, and from all ranks' rewards to the scores of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebft_ds.errors import EbftError, NumericsError
from ebft_ds.features.scoring_layout import ScoringLayout
from ebft_ds.features.whitening import WhiteningKind
from ebft_ds.rewards.feature_matching import FeatureRewards, group_feature_rewards
from ebft_ds.types import RolloutGroup

_GROUP_FIELDS = ("cfm_loss", "fm_loss_unbiased", "gram_identity", "whitening_kept_ratio")
_SAMPLE_FIELDS = ("reward", "alignment", "diversity", "diversity_to_siblings")


@dataclass(frozen=True)
class Scores:
    """Rewards of G groups of n completions, on the CPU, the same on every rank, and what the scoring cost over all ranks."""

    rewards: FeatureRewards
    empty_completions: int
    """Completions without a token: left out of their group, advantage 0."""
    real_tokens: int
    """Forwarded, without padding."""
    padded_tokens: int
    """Forwarded, with padding."""
    unshared_tokens: int
    """What `real_tokens` were if every forwarded sequence brought its own prompt."""
    cached_references: int
    """References that were not forwarded, because their features were at hand."""


@dataclass(frozen=True)
class RewardRule:
    """As the arguments of `group_feature_rewards`."""

    alignment_coef: float
    diversity_coef: float
    whitening: WhiteningKind | None
    whitening_rtol: float


def reward_groups(
    own: Sequence[int],
    groups: Sequence[RolloutGroup],
    layout: ScoringLayout,
    features: Mapping[int, Tensor],
    rule: RewardRule,
    weights: Tensor | None,
    *,
    rank: int,
) -> dict[str, Any]:
    """These groups as {group: {field: values}}; an error is part of the answer, so that no rank waits for one that raised."""
    results: dict[str, dict[str, list[float]]] = {}
    try:
        for g in own:
            results[str(g)] = _reward_group(g, groups[g], layout, features, rule, weights)
    except (EbftError, RuntimeError) as error:  # a decomposition that does not converge is a RuntimeError of torch
        return {"error": f"{type(error).__name__} on rank {rank}: {error}"}
    return {"groups": results}


def _reward_group(
    g: int, group: RolloutGroup, layout: ScoringLayout, features: Mapping[int, Tensor], rule: RewardRule, weights: Tensor | None
) -> dict[str, list[float]]:
    reference = features[layout.reference[g]]
    row = layout.completion[g]
    stacked = torch.stack([torch.zeros_like(reference) if i is None else features[i] for i in row])
    try:
        scored = group_feature_rewards(
            stacked[None],
            reference[None],
            alignment_coef=rule.alignment_coef,
            diversity_coef=rule.diversity_coef,
            whitening=rule.whitening,
            mask=torch.tensor([[i is not None for i in row]]),
            whitening_rtol=rule.whitening_rtol,
            completion_weights=None if weights is None else weights[g : g + 1],
        )
    except NumericsError as error:
        raise NumericsError(f"prompt {group.prompt.prompt_id} (index {group.prompt.index}): {error}") from error
    values = {name: getattr(scored, name)[0].double().tolist() for name in _SAMPLE_FIELDS}
    return values | {name: [float(getattr(scored, name)[0])] for name in _GROUP_FIELDS}


def assemble_scores(layout: ScoringLayout, answers: Sequence[dict[str, Any]], rule: RewardRule, cached_references: int) -> Scores:
    """All ranks' `reward_groups`, each with its token counts.

    Raises:
        NumericsError: one of them holds an error.
    """
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        raise NumericsError("scoring failed: " + "; ".join(errors))
    by_group: dict[int, dict[str, list[float]]] = {int(g): v for answer in answers for g, v in answer["groups"].items()}
    count = len(layout.reference)
    fields = {name: torch.tensor([by_group[g][name] for g in range(count)]) for name in _SAMPLE_FIELDS}
    scalars = {name: torch.tensor([by_group[g][name][0] for g in range(count)]) for name in _GROUP_FIELDS}
    mask = layout.mask()
    rewards = FeatureRewards(
        **fields,
        cfm_loss=scalars["cfm_loss"],
        fm_loss_unbiased=scalars["fm_loss_unbiased"],
        gram_identity=scalars["gram_identity"].bool(),
        whitening_kept_ratio=scalars["whitening_kept_ratio"],
        alignment_coef=rule.alignment_coef,
        diversity_coef=rule.diversity_coef,
        mask=mask,
    )
    return Scores(
        rewards=rewards,
        empty_completions=int((~mask).sum()),
        real_tokens=sum(int(answer["real_tokens"]) for answer in answers),
        padded_tokens=sum(int(answer["padded_tokens"]) for answer in answers),
        unshared_tokens=sum(int(answer["unshared_tokens"]) for answer in answers),
        cached_references=cached_references,
    )
