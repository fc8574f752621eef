"""From groups to micro-batches: which tokens are trained, where their log-probs are read, and where they go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.config.sections import RunSection
from ebft_ds.errors import ConfigError
from ebft_ds.packing.attention.dense import DenseAttention
from ebft_ds.packing.packer import RowPacker
from ebft_ds.policy.batch import PolicyPacker, TrainSequence, build_micro_batch, completion_sequences, reference_sequence
from ebft_ds.types import Prompt, Rollout, RolloutGroup, TokenSpan

PROMPT = Prompt(0, 0, 0, [11, 12, 13], [31, 32])


def rollout(ids: list[int], spans: list[TokenSpan] | None = None, finish: str = "stop") -> Rollout:
    whole = [TokenSpan(0, len(ids), 0)] if ids else []
    return Rollout(ids, [-float(i) for i in ids], whole if spans is None else spans, finish)  # type: ignore[arg-type]


@st.composite
def train_sequences(draw: st.DrawFn) -> TrainSequence:
    count = draw(st.integers(1, 6))
    token = st.integers(1, 99)
    return TrainSequence(
        group=0,
        prompt_ids=draw(st.lists(token, min_size=1, max_size=5)),
        completion_ids=draw(st.lists(token, min_size=count, max_size=count)),
        trained=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        sampling_logprobs=draw(st.lists(st.floats(-9, 0), min_size=count, max_size=count)),
        advantage=draw(st.floats(-2, 2)),
        is_reference=draw(st.booleans()),
    )


@given(st.lists(train_sequences(), min_size=1, max_size=5))
def test_every_trained_token_is_read_before_it_and_returned_to_its_place(sequences: list[TrainSequence]) -> None:
    batch = build_micro_batch(sequences, temperature=0.5)
    wanted = [(b, t) for b, s in enumerate(sequences) for t, on in enumerate(s.trained) if on]
    assert batch.mask.nonzero().tolist() == [list(place) for place in wanted]
    assert batch.is_reference.tolist() == [s.is_reference for s in sequences]
    torch.testing.assert_close(batch.advantages, torch.tensor([s.advantage for s in sequences]))
    if not wanted:
        return
    for i, (b, t) in enumerate(wanted):
        row, column = divmod(int(batch.positions[i]), batch.rows.input_ids.shape[1])
        assert (row, column) == (b, len(sequences[b].prompt_ids) + t - 1)
        assert int(batch.rows.input_ids[row, column + 1]) == int(batch.targets[i]) == sequences[b].completion_ids[t]
        assert float(batch.inverse_temperature[i]) == (1.0 if sequences[b].is_reference else 2.0)
    values = torch.arange(1.0, len(wanted) + 1, requires_grad=True)
    table = batch.scatter(values)
    assert table.shape == batch.mask.shape
    assert table[batch.mask].tolist() == values.tolist()
    assert (table[~batch.mask] == 0).all()
    (table * 3.0).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3.0] * len(wanted)


PACKERS = [RowPacker(), RowPacker("unshared", DenseAttention), RowPacker("shared", DenseAttention)]


@st.composite
def groups_of_sequences(draw: st.DrawFn) -> list[TrainSequence]:
    """Up to three groups; the sequences of one have the same prompt and are neighbours."""
    found: list[TrainSequence] = []
    for group in range(draw(st.integers(1, 3))):
        members = draw(st.lists(train_sequences(), min_size=1, max_size=4))
        found += [replace(s, group=group, prompt_ids=members[0].prompt_ids) for s in members]
    return found


@given(groups_of_sequences(), st.sampled_from(PACKERS))
def test_every_layout_reads_each_token_where_its_own_sequence_predicts_it(sequences: list[TrainSequence], packer: RowPacker) -> None:
    batch = build_micro_batch(sequences, temperature=0.5, packer=packer)
    padded = build_micro_batch(sequences, temperature=0.5)
    assert torch.equal(batch.targets, padded.targets)
    assert torch.equal(batch.slots, padded.slots)
    assert torch.equal(batch.mask, padded.mask)
    assert torch.equal(batch.inverse_temperature, padded.inverse_temperature)
    wanted = [(s, t) for s in sequences for t, on in enumerate(s.trained) if on]
    ids, places = batch.rows.input_ids.flatten(), batch.rows.body_inputs()["position_ids"].flatten()
    for position, (s, t) in zip(batch.positions.tolist(), wanted, strict=False):
        assert int(places[position]) == len(s.prompt_ids) + t - 1
        assert int(ids[position]) == [*s.prompt_ids, *s.completion_ids][len(s.prompt_ids) + t - 1]
    assert batch.unshared_tokens == sum(s.length for s in sequences)
    assert batch.rows.real_tokens <= batch.unshared_tokens


def test_a_runs_micro_batches_are_cut_by_rows_or_by_tokens() -> None:
    run = RunSection(per_device_train_batch_size=2)
    sequences = [reference_sequence(g, PROMPT) for g in range(6)]  # five tokens each
    padded = PolicyPacker.for_run(PACKERS[0], run, max_seq_length=8)
    assert [len(batch) for batch in padded.plan(sequences, 1).ranks[0]] == [2, 2, 2]
    packed = PolicyPacker.for_run(PACKERS[2], run, max_seq_length=8)
    assert [len(batch) for batch in packed.plan(sequences, 1).ranks[0]] == [3, 3], "two sequences of eight tokens hold three of five"
    limited = PolicyPacker.for_run(PACKERS[2], run.model_copy(update={"train_token_budget": 10}), max_seq_length=8)
    assert [len(batch) for batch in limited.plan(sequences, 1).ranks[0]] == [2, 2, 2]
    with pytest.raises(ConfigError, match="train_token_budget"):
        PolicyPacker(PACKERS[2], None, 4).plan(sequences, 1)


@given(st.lists(train_sequences(), min_size=1, max_size=5))
def test_sampling_log_probs_stand_under_their_tokens(sequences: list[TrainSequence]) -> None:
    batch = build_micro_batch(sequences, temperature=1.0)
    for b, s in enumerate(sequences):
        torch.testing.assert_close(batch.sampling_logp[b, : len(s.completion_ids)], torch.tensor(s.sampling_logprobs))
        assert (batch.sampling_logp[b, len(s.completion_ids) :] == 0).all()


def test_inserted_tokens_are_context_and_not_trained() -> None:
    spans = [TokenSpan(0, 2, 3), TokenSpan(2, 4, 0, sampled=False), TokenSpan(4, 5, 4)]
    (sequence,) = completion_sequences(
        [RolloutGroup(PROMPT, [rollout([21, 22, 23, 24, 25], spans)])], torch.ones(1, 1), mask_truncated=False
    )
    batch = build_micro_batch([sequence], temperature=1.0)
    assert batch.mask.tolist() == [[True, True, False, False, True]]
    assert batch.rows.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24, 25]]
    assert batch.targets.tolist() == [21, 22, 25]
    assert batch.positions.tolist() == [2, 3, 6]


def test_truncated_completions_train_nothing_but_stay_rows() -> None:
    group = RolloutGroup(PROMPT, [rollout([21, 22], finish="length"), rollout([23])])
    kept = completion_sequences([group], torch.ones(1, 2), mask_truncated=False)
    masked = completion_sequences([group], torch.ones(1, 2), mask_truncated=True)
    assert [s.trained_tokens for s in kept] == [2, 1]
    assert [s.trained_tokens for s in masked] == [0, 1]
    assert build_micro_batch(masked, temperature=1.0).mask.tolist() == [[False, False], [True, False]]


def test_empty_completions_are_left_out_and_advantages_stay_with_their_owners() -> None:
    groups = [RolloutGroup(PROMPT, [rollout([]), rollout([21])]), RolloutGroup(PROMPT, [rollout([22]), rollout([])])]
    sequences = completion_sequences(groups, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mask_truncated=False)
    assert [(s.group, s.completion_ids, s.advantage) for s in sequences] == [(0, [21], 2.0), (1, [22], 3.0)]


def test_a_reference_trains_every_token_at_temperature_one() -> None:
    batch = build_micro_batch([reference_sequence(0, PROMPT)], temperature=0.5)
    assert batch.targets.tolist() == PROMPT.reference_ids
    assert batch.inverse_temperature.tolist() == [1.0, 1.0]
    assert batch.is_reference.tolist() == [True]


def test_nothing_to_train_still_asks_for_one_log_prob() -> None:
    truncated = completion_sequences([RolloutGroup(PROMPT, [rollout([21], finish="length")])], torch.ones(1, 1), mask_truncated=True)
    for sequences in ([], truncated):
        batch = build_micro_batch(sequences, temperature=1.0)
        assert not batch.mask.any()
        assert batch.targets.shape == (1,)
        assert int(batch.positions[0]) < batch.rows.input_ids.numel()
        values = torch.ones(1, requires_grad=True)
        assert batch.scatter(values).requires_grad
