"""EBFTScorer: a step's groups in, identical rewards for all of them out on every rank.

The forwards are ZeRO-3 collectives, so all ranks run the same number of them (empty micro-batches run a dummy row). A group is
rewarded on one rank; features travel only where a group was split over ranks or its cached reference lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.errors import ConfigError
from ebft_ds.features.cached_references import CachedReferences, feature_recipe
from ebft_ds.features.eos import resolve_feature_eos
from ebft_ds.features.forwards import Forwarded, Pooling, forward_features
from ebft_ds.features.network import FeatureNetwork
from ebft_ds.features.placement import gather_at_owners, group_owners
from ebft_ds.features.reference_cache import ReferenceCache
from ebft_ds.features.scores import RewardRule, Scores, assemble_scores, reward_groups
from ebft_ds.features.scoring_layout import ScoringLayout, scoring_layout
from ebft_ds.features.whitening import default_whitening_rtol, whitening_kind
from ebft_ds.packing.packer import RowPacker
from ebft_ds.types import RolloutGroup

__all__ = ["EBFTScorer", "Scores"]


class EBFTScorer:
    """Feature-matching rewards under a frozen feature network (METHOD sections 1 and 2).

    Args:
        layer_indices: hidden-state indices, from `feature_layer_indices`.
        embed_method: `last_token`, `mean_pooling`, `completion_mean` or `concat`.
        use_whitening: false, true (= `feature`), `feature` or `sample`.
        alignment_coef, diversity_coef: of the reward.
        feature_network: may be set later, before the first score.
        feature_norm, feature_eos, whitening_rtol: as the `ebft_` fields; eos_ids: what counts as a terminal EOS.
        token_budget: most tokens in one forward on one rank, padding included.
        packer: how rows are laid out; default: padded.
        reference_cache: keeps the references' features; the network must be frozen. Scorers may share one.
    """

    def __init__(
        self,
        layer_indices: Sequence[int],
        embed_method: str,
        use_whitening: bool | str,
        alignment_coef: float,
        diversity_coef: float,
        feature_network: FeatureNetwork | None = None,
        *,
        feature_norm: str = "pooled",
        feature_eos: Literal["auto", "include", "exclude"] = "auto",
        eos_ids: Collection[int] = (),
        whitening_rtol: float | None = None,
        token_budget: int = 16384,
        packer: RowPacker | None = None,
        reference_cache: ReferenceCache | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self.layer_indices = list(layer_indices)
        self.embed_method = embed_method
        self.whitening = whitening_kind(use_whitening)
        self.alignment_coef = alignment_coef
        self.diversity_coef = diversity_coef
        self.feature_network = feature_network
        self.feature_norm = feature_norm
        self.feature_eos = resolve_feature_eos(embed_method, feature_eos)
        self.eos_ids = frozenset(eos_ids)
        self.whitening_rtol = whitening_rtol
        self.token_budget = token_budget
        self.packer = packer or RowPacker()
        self.reference_cache = reference_cache
        self.collectives = collectives or Collectives()
        self._identity: tuple[FeatureNetwork, str] | None = None

    def score(self, groups: Sequence[RolloutGroup], completion_weights: Tensor | None = None) -> Scores:
        """Collective: every rank passes the same groups and gets the same scores.

        Args:
            completion_weights: [G, n] sequence weights for `diversity_importance: sequence`.

        Raises:
            DataError: an empty reference.
            NumericsError: a non-finite feature, on every rank, naming prompt and completion.
        """
        if self.feature_network is None:
            raise ConfigError("EBFTScorer has no feature_network: pass one, or set scorer.feature_network before scoring")
        layout = scoring_layout(groups, self.eos_ids, self.feature_eos)
        cached = self._cached_references(layout, self.feature_network)
        done, forwarded = self._forward(layout, cached.holders, self.feature_network)
        cached.keep(done.features)

        rank, world_size = self.collectives.rank, self.collectives.world_size
        owners = group_owners(layout, forwarded, cached.holders, world_size)
        features = done.features | cached.own
        gather_at_owners(features, layout, forwarded | cached.holders, owners, done.width, self.collectives)
        rule = self._reward_rule(done)
        own = [g for g, owner in enumerate(owners) if owner == rank]
        answer = reward_groups(own, groups, layout, features, rule, completion_weights, rank=rank)
        tokens = {"real_tokens": done.real_tokens, "padded_tokens": done.padded_tokens, "unshared_tokens": done.unshared_tokens}
        return assemble_scores(layout, self.collectives.all_gather(answer | tokens), rule, len(cached.holders))

    @property
    def _pooling(self) -> Pooling:
        return Pooling(self.layer_indices, self.embed_method, self.feature_norm)

    def _reward_rule(self, done: Forwarded) -> RewardRule:
        # The cutoff goes by the network's precision: pooled features are float32 whatever computed them.
        rtol = default_whitening_rtol(done.dtype) if self.whitening_rtol is None else self.whitening_rtol
        return RewardRule(self.alignment_coef, self.diversity_coef, self.whitening, rtol)

    def _cached_references(self, layout: ScoringLayout, network: FeatureNetwork) -> CachedReferences:
        if self.reference_cache is None:
            return CachedReferences()
        if self._identity is None or self._identity[0] is not network:
            # Rank 0's word: keys must be the same on all ranks, even where their devices round differently.
            identity = self.collectives.broadcast(network.identity(self.layer_indices), str)
            assert identity is not None
            self._identity = network, identity
        return CachedReferences.look_up(self.reference_cache, layout, feature_recipe(self._identity[1], self._pooling))

    def _forward(self, layout: ScoringLayout, cached: Collection[int], network: FeatureNetwork) -> tuple[Forwarded, dict[int, int]]:
        """What this rank forwarded, and the rank of every sequence that is not `cached`."""
        wanted = [i for i in range(len(layout.sequences)) if i not in cached]
        chosen = [layout.sequences[i] for i in wanted]
        plan = self.packer.plan(chosen, self.collectives.world_size, token_budget=self.token_budget)
        batches = [[wanted[k] for k in batch] for batch in plan.ranks[self.collectives.rank]]
        done = forward_features(layout.sequences, batches, network, self.packer, self._pooling)
        return done, {wanted[k]: rank for k, rank in plan.owner_of().items()}
