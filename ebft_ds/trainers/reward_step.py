"""The forwards and backwards of one optimizer step of a reward model, in lockstep over ranks.

Every rank holds all rows of the step, so the plan and the number of pairs are computed, not communicated, and the gradient does not
depend on how the step is split. What a rank notes in the metrics are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.config.derived_reward import RewardNumbers
from ebft_ds.config.sections import RunSection
from ebft_ds.data.preference import EncodedResponses
from ebft_ds.engine.network import ScoreWork
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.packing.rows import RowStyle
from ebft_ds.packing.whole_groups import WholeGroup, build_group_rows, plan_whole_groups
from ebft_ds.rewards.calibration import hit
from ebft_ds.rewards.preference_loss import PreferenceLoss
from ebft_ds.rewards.preference_metrics import PreferenceTally
from ebft_ds.trainers.finite_loss import agree_finite
from ebft_ds.trainers.reward_engine import RewardEngine
from ebft_ds.trainers.step_work import log_rows_work


class RewardStep:
    """Accumulates the gradient of one step; the optimizer step itself is the caller's.

    Args:
        check_stop: collective, called before each micro-batch; may raise.
    """

    def __init__(
        self,
        reward: RewardEngine,
        collectives: Collectives,
        *,
        loss: PreferenceLoss,
        run: RunSection,
        derived: RewardNumbers,
        check_stop: Callable[[], None],
    ) -> None:
        self._engine = reward.engine
        self._packer = reward.packer
        self._collectives = collectives
        self._loss = loss
        self._run = run
        self._default_budget = derived.train_token_budget
        self._check_stop = check_stop

    def accumulate(self, step: int, rows: Sequence[EncodedResponses], metrics: MetricsAccumulator) -> None:
        """Collective: every rank passes the same rows.

        Raises:
            ConfigError: a row over `train_token_budget`. NumericsError, PeerError: a loss that is not finite.
        """
        groups = [row.whole_group() for row in rows]
        terms = self._loss.terms([len(row.group) for row in rows])
        plan = plan_whole_groups(
            groups,
            self._collectives.world_size,
            self._packer,
            token_budget=self._token_budget(groups),
            max_groups=self._run.per_device_train_batch_size,
        )
        shares = plan.ranks[self._collectives.rank]
        for number, indices in enumerate(shares):
            self._check_stop()
            micro = [rows[i] for i in indices]
            built = build_group_rows([groups[i] for i in indices], self._packer, device=self._engine.device)
            rewards = self._engine.scores(ScoreWork(built.rows, built.ends))
            total, _ = self._loss.sums(rewards, built.counts, [row.margin for row in micro], [row.preference for row in micro])
            loss = total / terms
            where = f"step {step}, rank {self._collectives.rank}, micro-batch {number}"
            agree_finite(loss, self._collectives, where, f"rows {[row.row for row in micro]}")
            self._engine.backward(loss, last=number == len(shares) - 1)
            metrics.sum("loss", float(loss.detach()))
            if micro:
                log_rewards(micro, rewards.detach(), metrics)
                log_rows_work(built.rows, built.unshared_tokens, built.ends.numel(), metrics)

    def _token_budget(self, groups: Sequence[WholeGroup]) -> int | None:
        """The default one gives way to a group that is larger (a long ranking); one that was set does not. Padded rows are counted."""
        if self._run.train_token_budget or self._packer.style == "padded":
            return self._run.train_token_budget
        return roomy_budget(self._default_budget, groups, self._packer.style)


def roomy_budget(budget: int, groups: Sequence[WholeGroup], style: RowStyle) -> int:
    """At least what the largest group takes."""
    return max([budget, *(sum(group.tokens(style)) for group in groups)])


def log_rewards(rows: Sequence[EncodedResponses], rewards: Tensor, metrics: MetricsAccumulator) -> None:
    """`reward/*` of some rows, as sums over their pairs and responses."""
    tally = tally_of(rows, split_rewards(rows, rewards.tolist()))
    gaps = [gap for row in tally.rows for gap in row.gaps()]
    labelled = [difference for row in tally.rows for difference in row.differences()]
    metrics.mean("reward/accuracy", _mean([hit(difference) for difference in labelled]), len(labelled))
    metrics.mean("reward/tie_share", _mean([float(gap == 0) for gap in gaps]), len(gaps))
    metrics.mean("reward/margin", _mean(gaps), len(gaps))
    for name, values in (("chosen_mean", tally.chosen), ("rejected_mean", tally.rejected), ("mean", tally.chosen + tally.rejected)):
        metrics.mean(f"reward/{name}", _mean(values), len(values))
    metrics.min("reward/min", min(tally.chosen + tally.rejected))
    metrics.max("reward/max", max(tally.chosen + tally.rejected))
    metrics.sum("reward/pairs", len(gaps))


def split_rewards(rows: Sequence[EncodedResponses], rewards: Sequence[float]) -> list[list[float]]:
    """Rewards row by row."""
    found, start = [], 0
    for row in rows:
        found.append(list(rewards[start : start + len(row.group)]))
        start += len(row.group)
    return found


def tally_of(rows: Sequence[EncodedResponses], rewards: Sequence[Sequence[float]], loss: PreferenceLoss | None = None) -> PreferenceTally:
    """`loss`: noted too."""
    tally = PreferenceTally()
    for row, values in zip(rows, rewards, strict=True):
        total, terms = loss.row(values, margin=row.margin, preference=row.preference) if loss is not None else (0.0, None)
        tally.add(values, loss=total, terms=terms, margin=row.margin, preference=row.preference, subset=row.subset)
    return tally


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
