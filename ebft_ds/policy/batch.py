"""From scored groups to micro-batches of the policy loss. Pure; every rank builds the same sequences and takes its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_ds.config.derived import train_token_budget
from ebft_ds.config.sections import RunSection
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.plan import Plan
from ebft_ds.packing.rows import TokenRows
from ebft_ds.types import Prompt, Rollout, RolloutGroup


@dataclass(frozen=True)
class TrainSequence:
    """One row of the policy forward: a completion with its advantage, or a reference for the cross-entropy."""

    group: int
    prompt_ids: list[int]
    completion_ids: list[int]
    trained: list[bool]
    """Per completion token: takes part in the loss."""
    sampling_logprobs: list[float]
    """Of the engine; zeros for a reference."""
    advantage: float
    is_reference: bool

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained)


def completion_sequence(group: int, prompt: Prompt, rollout: Rollout, advantage: float, *, mask_truncated: bool) -> TrainSequence:
    """A completion; with `mask_truncated`, one that ran out of budget trains on no token (but still counts as a row)."""
    trained = [False] * len(rollout.token_ids) if mask_truncated and rollout.finish_reason == "length" else rollout.sampled_mask
    return TrainSequence(group, prompt.token_ids, rollout.token_ids, trained, rollout.logprobs, advantage, False)


def reference_sequence(group: int, prompt: Prompt) -> TrainSequence:
    """The reference completion, every token of it trained."""
    count = len(prompt.reference_ids)
    return TrainSequence(group, prompt.token_ids, prompt.reference_ids, [True] * count, [0.0] * count, 0.0, True)


def completion_sequences(groups: Sequence[RolloutGroup], advantages: Tensor, *, mask_truncated: bool) -> list[TrainSequence]:
    """All completions that hold a token, in group order. `advantages` [G, n]."""
    return [
        completion_sequence(g, group.prompt, rollout, float(advantages[g, j]), mask_truncated=mask_truncated)
        for g, group in enumerate(groups)
        for j, rollout in enumerate(group.rollouts)
        if rollout.token_ids
    ]


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward, the positions whose log-probs are wanted, and the [B, T] layout (T = longest completion) of the loss."""

    rows: TokenRows
    positions: Tensor
    """int64 [N]: flat positions that predict the wanted tokens."""
    targets: Tensor
    inverse_temperature: Tensor
    slots: Tensor
    """int64 [N]: flat index b * T + t of each wanted token."""
    mask: Tensor
    """bool [B, T]: trained tokens."""
    sampling_logp: Tensor
    """float32 [B, T]."""
    advantages: Tensor
    """float32 [B]."""
    is_reference: Tensor
    """bool [B]."""
    unshared_tokens: int
    """Real tokens that these sequences take when no prompt is shared."""

    def scatter(self, values: Tensor) -> Tensor:
        """[N] values in the [B, T] layout, zeros elsewhere; differentiable."""
        flat = torch.zeros(self.mask.numel(), dtype=values.dtype, device=values.device)
        return flat.scatter(0, self.slots, values).view(self.mask.shape)


def build_micro_batch(
    sequences: Sequence[TrainSequence], *, temperature: float, packer: RowPacker | None = None, device: torch.device | str = "cpu"
) -> MicroBatch:
    """Rows as `packer` lays them out (default: padded). Completions are scored at the sampling temperature, references at 1.

    No sequence gives a dummy row with nothing trained.

    The dummy asks for one log-prob, so that its backward touches every parameter: ZeRO-3 reduces gradients collectively.
    """
    laid_out = (packer or RowPacker()).build(sequences, device=device)
    width = max((len(s.completion_ids) for s in sequences), default=1)
    count = max(len(sequences), 1)
    mask = torch.zeros(count, width, dtype=torch.bool)
    sampling = torch.zeros(count, width)
    positions, targets, inverse, slots = [], [], [], []
    for b, (s, place) in enumerate(zip(sequences, laid_out.places, strict=True)):
        mask[b, : len(s.trained)] = torch.tensor(s.trained, dtype=torch.bool)
        sampling[b, : len(s.sampling_logprobs)] = torch.tensor(s.sampling_logprobs)
        for t, wanted in enumerate(s.trained):
            if wanted:
                positions.append(place.predictor(t))
                targets.append(s.completion_ids[t])
                inverse.append(1.0 if s.is_reference else 1.0 / temperature)
                slots.append(b * width + t)
    if not targets:
        positions, targets, inverse, slots = [0], [0], [1.0], [0]

    def indices(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return MicroBatch(
        rows=laid_out.rows,
        positions=indices(positions),
        targets=indices(targets),
        inverse_temperature=torch.tensor(inverse, dtype=torch.float32, device=device),
        slots=indices(slots),
        mask=mask.to(device),
        sampling_logp=sampling.to(device),
        advantages=torch.tensor([s.advantage for s in sequences] or [0.0], dtype=torch.float32, device=device),
        is_reference=torch.tensor([s.is_reference for s in sequences] or [False], dtype=torch.bool, device=device),
        unshared_tokens=laid_out.unshared_tokens,
    )


@dataclass(frozen=True)
class PolicyPacker:
    """Plan and micro-batches of the policy's forwards: training, cross-entropy, log-probs without gradient.

    Padded rows are counted (`max_sequences`), packed rows are measured (`token_budget`), where one more completion behind a shared
    prompt costs little.
    """

    rows: RowPacker
    max_sequences: int | None
    token_budget: int | None

    @classmethod
    def for_run(cls, rows: RowPacker, run: RunSection, *, max_seq_length: int) -> PolicyPacker:
        """The run's limits: `per_device_train_batch_size` padded rows, `train_token_budget` tokens."""
        if rows.style == "padded":
            return cls(rows, run.per_device_train_batch_size, run.train_token_budget)
        return cls(rows, None, train_token_budget(run, max_seq_length=max_seq_length))

    def plan(self, sequences: Sequence[TrainSequence], world_size: int) -> Plan:
        """Pure: the same on every rank."""
        return self.rows.plan(
            sequences, world_size, token_budget=self.token_budget, max_sequences=self.max_sequences, budget_name="train_token_budget"
        )

    def build(self, sequences: Sequence[TrainSequence], *, temperature: float, device: torch.device | str = "cpu") -> MicroBatch:
        """See `build_micro_batch`."""
        return build_micro_batch(sequences, temperature=temperature, packer=self.rows, device=device)
