"""The scorers of a run: one to train on, two to evaluate with, and the reference features that they share."""

from __future__ import annotations

from dataclasses import dataclass

from ebft_ds.collectives import Collectives
from ebft_ds.config import RecipeConfig
from ebft_ds.features.reference_cache import ReferenceCache
from ebft_ds.features.scorer import EBFTScorer
from ebft_ds.trainers.engines import Engines


@dataclass(frozen=True)
class Scorers:
    """All over the same feature network."""

    training: EBFTScorer
    held_out: EBFTScorer
    """The trained pooling, without whitening: it rescales with each group's own spread, so its alignment before and after could not be
    compared."""
    other: EBFTScorer
    """Another pooling, without whitening: a loss that training does not push on directly."""
    reference_cache: ReferenceCache | None


def build_scorers(config: RecipeConfig, engines: Engines, eos_ids: list[int], collectives: Collectives) -> Scorers:
    """The recipe's scorers."""
    method = config.method
    cache = ReferenceCache(method.reference_cache_mb, collectives) if method.cache_reference_features else None

    def scorer(embed_method: str, use_whitening: bool | str) -> EBFTScorer:
        return EBFTScorer(
            engines.layer_indices,
            embed_method,
            use_whitening,
            method.ebft_alignment_coef,
            method.ebft_diversity_coef,
            engines.feature_network,
            feature_norm=method.ebft_feature_norm,
            feature_eos=method.ebft_feature_eos if embed_method == method.ebft_embed_method else "auto",
            eos_ids=eos_ids,
            whitening_rtol=method.ebft_whitening_rtol,
            token_budget=method.scoring_token_budget,
            packer=engines.feature_packer,
            reference_cache=cache,
            collectives=collectives,
        )

    other = "last_token" if method.ebft_embed_method != "last_token" else "completion_mean"
    return Scorers(
        scorer(method.ebft_embed_method, method.ebft_use_whitening), scorer(method.ebft_embed_method, False), scorer(other, False), cache
    )
