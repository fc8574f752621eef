"""EBFTScorer: a step's groups in, identical rewards for all of them out on every rank.

The forwards are ZeRO-3 collectives, so all ranks run the same number of them (empty micro-batches run a dummy row). Features
travel only for groups that were split over ranks; for the others nothing but rewards does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.errors import ConfigError, DataError, EbftError, NumericsError
from ebft_ds.features.eos import feature_span, resolve_feature_eos
from ebft_ds.features.network import FeatureNetwork
from ebft_ds.features.pooling import pool_features
from ebft_ds.features.spans import TokenRange, feature_spans
from ebft_ds.features.whitening import default_whitening_rtol, whitening_kind
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.plan import Plan
from ebft_ds.rewards.feature_matching import FeatureRewards, group_feature_rewards
from ebft_ds.types import RolloutGroup

_GROUP_FIELDS = ("cfm_loss", "fm_loss_unbiased", "gram_identity", "whitening_kept_ratio")
_SAMPLE_FIELDS = ("reward", "alignment", "diversity", "diversity_to_siblings")


@dataclass(frozen=True)
class Scores:
    """Rewards of G groups of n completions, on the CPU, the same on every rank, and what the scoring cost."""

    rewards: FeatureRewards
    empty_completions: int
    """Completions without a token: left out of their group, advantage 0."""
    real_tokens: int
    padded_tokens: int
    """Over all ranks; padded counts rows x longest row."""


@dataclass(frozen=True)
class _Entry:
    """One distinct sequence: prompt plus a completion or the reference, and the span its feature is taken from."""

    group: int
    prompt_ids: list[int]
    completion_ids: list[int]
    tokens: TokenRange

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class _Layout:
    entries: list[_Entry]
    reference: list[int]
    """Group -> entry of its reference."""
    completion: list[list[int | None]]
    """Group, sample -> entry (shared by identical completions), None for an empty one."""


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
        self.collectives = collectives or Collectives()

    def score(self, groups: Sequence[RolloutGroup], completion_weights: Tensor | None = None) -> Scores:
        """Collective: every rank passes the same groups and gets the same scores.

        Args:
            completion_weights: [G, n] sequence weights for `diversity_importance: sequence`.

        Raises:
            NumericsError: a non-finite feature, on every rank, naming prompt and completion.
        """
        if self.feature_network is None:
            raise ConfigError("EBFTScorer has no feature_network: pass one, or set scorer.feature_network before scoring")
        layout = self._layout(groups)
        plan = self.packer.plan(layout.entries, self.collectives.world_size, token_budget=self.token_budget)
        features, padded = self._forward(layout, plan, self.feature_network)
        owners = _group_owners(layout, plan, self.collectives.world_size)
        self._share_split_groups(layout, plan, features)
        own = [g for g, owner in enumerate(owners) if owner == self.collectives.rank]
        answer = self._reward_groups(own, groups, layout, features, completion_weights)
        answers = self.collectives.all_gather(answer | {"padded": padded})
        return self._assemble(groups, layout, answers)

    def _layout(self, groups: Sequence[RolloutGroup]) -> _Layout:
        entries: list[_Entry] = []
        references: list[int] = []
        completions: list[list[int | None]] = []
        for g, group in enumerate(groups):
            prompt = group.prompt.token_ids
            span = feature_span(len(prompt), group.prompt.reference_ids, self.eos_ids, self.feature_eos)
            if span is None:
                raise DataError(f"prompt {group.prompt.prompt_id} has an empty reference: nothing to match")
            references.append(len(entries))
            entries.append(_Entry(g, prompt, group.prompt.reference_ids, TokenRange(*span)))
            # Identical completions share one feature vector: two forwards of the same tokens would differ by rounding, and
            # whitening would blow that difference up into a signal.
            seen: dict[tuple[int, ...], int] = {}
            row: list[int | None] = []
            for rollout in group.rollouts:
                span = feature_span(len(prompt), rollout.token_ids, self.eos_ids, self.feature_eos)
                key = tuple(rollout.token_ids)
                if span is not None and key not in seen:
                    seen[key] = len(entries)
                    entries.append(_Entry(g, prompt, rollout.token_ids, TokenRange(*span)))
                row.append(None if span is None else seen[key])
            completions.append(row)
        return _Layout(entries, references, completions)

    def _forward(self, layout: _Layout, plan: Plan, network: FeatureNetwork) -> tuple[dict[int, Tensor], int]:
        """This rank's features by entry ([D], float32, CPU), and how many padded tokens it forwarded."""
        features: dict[int, Tensor] = {}
        padded = 0
        for batch in plan.ranks[self.collectives.rank]:
            entries = [layout.entries[i] for i in batch]
            built = self.packer.build(entries, device=network.device)
            spans = feature_spans(built.places, [entry.tokens for entry in entries], self.embed_method).to(network.device)
            hidden = network.hidden_states(built.rows, self.layer_indices, spans.positions)
            if self.whitening_rtol is None:
                # By the network's precision: pooled features are float32 whatever computed them.
                self.whitening_rtol = default_whitening_rtol(hidden[0].dtype)
            if not batch:
                continue
            padded += built.rows.input_ids.numel()
            pooled = pool_features(hidden, spans, norm=self.feature_norm).float()
            features |= dict(zip(batch, pooled.cpu(), strict=True))
        return features, padded

    def _share_split_groups(self, layout: _Layout, plan: Plan, features: dict[int, Tensor]) -> None:
        """Gathers the features of groups that live on several ranks, so that the group's owner has them all."""
        rank_of = plan.owner_of()
        split = _split_groups(layout, rank_of)
        wanted = [i for i, entry in enumerate(layout.entries) if entry.group in split]
        if not wanted:
            return
        mine = [i for i in wanted if rank_of[i] == self.collectives.rank]
        width = self.collectives.max_int(next(iter(features.values())).shape[0] if features else 0)
        rows = torch.stack([features[i] for i in mine]) if mine else torch.empty(0, width)
        gathered = self.collectives.all_gather_rows(rows)
        order = [i for rank in range(self.collectives.world_size) for i in wanted if rank_of[i] == rank]
        features.update(zip(order, gathered, strict=True))

    def _reward_groups(
        self, own: list[int], groups: Sequence[RolloutGroup], layout: _Layout, features: dict[int, Tensor], weights: Tensor | None
    ) -> dict[str, Any]:
        """This rank's groups as {group: {field: values}}; an error is part of the answer, so that no rank waits for one that raised."""
        results: dict[int, dict[str, list[float]]] = {}
        try:
            for g in own:
                results[g] = self._reward_group(g, groups[g], layout, features, weights)
        except EbftError as error:
            return {"error": f"{type(error).__name__} on rank {self.collectives.rank}: {error}"}
        return {"groups": {str(g): values for g, values in results.items()}}

    def _reward_group(
        self, g: int, group: RolloutGroup, layout: _Layout, features: dict[int, Tensor], weights: Tensor | None
    ) -> dict[str, list[float]]:
        reference = features[layout.reference[g]]
        row = layout.completion[g]
        stacked = torch.stack([torch.zeros_like(reference) if i is None else features[i] for i in row])
        mask = torch.tensor([i is not None for i in row])
        try:
            scored = group_feature_rewards(
                stacked[None],
                reference[None],
                alignment_coef=self.alignment_coef,
                diversity_coef=self.diversity_coef,
                whitening=self.whitening,
                mask=mask[None],
                whitening_rtol=self.whitening_rtol,
                completion_weights=None if weights is None else weights[g : g + 1],
            )
        except NumericsError as error:
            raise NumericsError(f"prompt {group.prompt.prompt_id} (index {group.prompt.index}): {error}") from error
        values = {name: getattr(scored, name)[0].double().tolist() for name in _SAMPLE_FIELDS}
        return values | {name: [float(getattr(scored, name)[0])] for name in _GROUP_FIELDS}

    def _assemble(self, groups: Sequence[RolloutGroup], layout: _Layout, answers: list[dict[str, Any]]) -> Scores:
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise NumericsError("scoring failed: " + "; ".join(errors))
        by_group: dict[int, dict[str, list[float]]] = {int(g): v for answer in answers for g, v in answer["groups"].items()}
        fields = {name: torch.tensor([by_group[g][name] for g in range(len(groups))]) for name in _SAMPLE_FIELDS}
        scalars = {name: torch.tensor([by_group[g][name][0] for g in range(len(groups))]) for name in _GROUP_FIELDS}
        mask = torch.tensor([[i is not None for i in row] for row in layout.completion])
        rewards = FeatureRewards(
            **fields,
            cfm_loss=scalars["cfm_loss"],
            fm_loss_unbiased=scalars["fm_loss_unbiased"],
            gram_identity=scalars["gram_identity"].bool(),
            whitening_kept_ratio=scalars["whitening_kept_ratio"],
            alignment_coef=self.alignment_coef,
            diversity_coef=self.diversity_coef,
            mask=mask,
        )
        return Scores(
            rewards=rewards,
            empty_completions=int((~mask).sum()),
            real_tokens=sum(entry.length for entry in layout.entries),
            padded_tokens=sum(int(answer["padded"]) for answer in answers),
        )


def _split_groups(layout: _Layout, rank_of: dict[int, int]) -> set[int]:
    ranks: dict[int, set[int]] = {}
    for i, entry in enumerate(layout.entries):
        ranks.setdefault(entry.group, set()).add(rank_of[i])
    return {group for group, where in ranks.items() if len(where) > 1}


def _group_owners(layout: _Layout, plan: Plan, world_size: int) -> list[int]:
    """The rank that computes each group's rewards: where the group is, or for split groups one after the other."""
    rank_of = plan.owner_of()
    split = _split_groups(layout, rank_of)
    return [g % world_size if g in split else rank_of[entry] for g, entry in enumerate(layout.reference)]
