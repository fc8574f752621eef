"""Layer choice, which tokens count, pooling at known positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from ebft_ds import features
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.features import feature_layer_indices, feature_length, feature_span, resolve_feature_eos
from ebft_ds.features.spans import TokenRange, feature_spans
from ebft_ds.packing.rows import Place

pool_hidden_states = jaxtyped(typechecker=beartype)(features.pool_hidden_states)
pool_at_spans = jaxtyped(typechecker=beartype)(features.pool_features)

METHODS = ["last_token", "mean_pooling", "completion_mean", "concat"]
POOLING = json.loads((Path(__file__).parents[1] / "data" / "ebft_vectors.json").read_text())["pooling"]


def t(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def pool_features(
    layers: list[torch.Tensor], start: torch.Tensor, length: torch.Tensor, method: str, *, prompt_start: torch.Tensor, norm: str = "pooled"
) -> torch.Tensor:
    """Features of one [1, T, H] row."""
    width = layers[0].shape[1]
    span = TokenRange(int(start), int(length), int(prompt_start))
    spans = feature_spans([Place(0, width, width, 0)], [span], method)
    return pool_at_spans([layer[0, spans.positions] for layer in layers], spans, norm=norm)


def test_layer_fractions() -> None:
    assert feature_layer_indices([0.25, 0.5, 0.75], 28) == [7, 14, 21]
    assert feature_layer_indices([0.25, 0.5, 0.75], 30) == [7, 15, 22]
    assert feature_layer_indices([0.3, 1.0, 1e-9], 10) == [3, 10, 1], "never layer 0"
    assert feature_layer_indices([0.29], 100) == [29], "0.29 * 100 is below 29 in floats"
    assert feature_layer_indices([0.75, 0.25], 12) == [9, 3], "order is the caller's"


def test_layer_numbers_and_repeats() -> None:
    assert feature_layer_indices([1, 12, 0.5], 12) == [1, 12, 6]
    assert feature_layer_indices([0.25, 0.5, 0.75], 2) == [1, 1, 1], "the width stays that of three layers"


@pytest.mark.parametrize("entry", [0.0, -0.25, 1.5, float("nan"), 0, -1, 13, True, "0.5", None])
def test_layer_refusals(entry: object) -> None:
    with pytest.raises(ConfigError, match="ebft_feature_layers"):
        feature_layer_indices([0.5, entry], 12)  # type: ignore[list-item]


def test_no_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        feature_layer_indices([], 12)


def test_feature_eos_default_by_method() -> None:
    assert [resolve_feature_eos(m) for m in METHODS] == ["exclude", "include", "include", "include"]
    assert resolve_feature_eos("last_token", "include") == "include"
    with pytest.raises(ConfigError, match="ebft_feature_eos"):
        resolve_feature_eos("last_token", "never")  # type: ignore[arg-type]


def test_feature_length() -> None:
    eos = {2, 7}
    assert feature_length([5, 6, 2], eos, "include") == 3
    assert feature_length([5, 6, 2], eos, "exclude") == 2
    assert feature_length([5, 2, 6], eos, "exclude") == 3, "an end token further inside is text"
    assert feature_length([5, 6, 7, 2], eos, "exclude") == 2, "end-of-turn and EOS close one reference"
    assert feature_length([5, 6], eos, "exclude") == 2, "cut off: no EOS to leave out"


def test_feature_span() -> None:
    assert feature_span(4, [5, 6, 2], {2}, "exclude") == (4, 2)
    assert feature_span(4, [5, 6, 2], {2}, "include") == (4, 3)
    assert feature_span(4, [2], {2}, "include") == (4, 1)
    assert feature_span(4, [2], {2}, "exclude") == (3, 1), "only EOS: the last prompt token"
    assert feature_span(4, [], {2}, "exclude") is None
    assert feature_span(0, [2], {2}, "exclude") is None


def test_pooling_agrees_with_known_numbers() -> None:
    hidden = torch.tensor(POOLING["hidden"])
    prompt, total = torch.tensor(POOLING["prompt_lengths"]), torch.tensor([sum(row) for row in POOLING["mask_right_padded"]])
    start, length = prompt, total - prompt
    zero = torch.zeros_like(prompt)

    def same(found: torch.Tensor, key: str) -> None:
        torch.testing.assert_close(found, torch.tensor(POOLING[key]), rtol=0, atol=0)

    same(pool_hidden_states(hidden, start, length, "last_token"), "axolotl_last_token_right")
    same(pool_hidden_states(hidden, start, length, "completion_mean"), "axolotl_completion_mean_right")
    same(pool_hidden_states(hidden, start, length, "mean_pooling", prompt_start=zero), "axolotl_mean_pooling_right")
    # Those numbers take the quarters of the whole sequence: here the whole sequence is named as the completion.
    same(pool_hidden_states(hidden, zero, total, "concat"), "axolotl_concat_right")
    same(pool_hidden_states(hidden, start, zero, "completion_mean"), "axolotl_completion_mean_empty_completion")
    # Left padding: row 0's tokens stand two positions later. (That code's other left-padded numbers take prompt tokens for completion.)
    pad = torch.tensor([2, 0])
    same(pool_hidden_states(hidden, start + pad, length, "mean_pooling", prompt_start=pad), "axolotl_mean_pooling_left")
    found = pool_hidden_states(hidden, start + pad, length, "last_token")
    assert found.tolist() == [[10.0, 11.0], [22.0, 23.0]]


def test_concat_quarters_of_the_completion() -> None:
    hidden = torch.arange(10.0).view(1, 10, 1)
    for length, offsets in {1: [0, 0, 0], 2: [0, 1, 1], 3: [0, 1, 2], 4: [1, 2, 3], 7: [1, 3, 5]}.items():
        assert pool_hidden_states(hidden, t(3), t(length), "concat").tolist() == [[3.0 + o for o in offsets]]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=4),
    method=st.sampled_from(METHODS),
    norm=st.sampled_from(["pooled", "token", "per_layer"]),
    left=st.booleans(),
)
def test_padding_never_matters(lengths: list[tuple[int, int]], method: str, norm: str, left: bool) -> None:
    width = 9
    generator = torch.Generator().manual_seed(0)
    for prompt, completion in lengths:
        rows = [torch.randn(1, prompt + completion + 1, 4, generator=generator) for _ in range(2)]  # one prompt token more
        alone = pool_features(rows, t(prompt + 1), t(completion), method, prompt_start=t(0), norm=norm)
        offset = width - rows[0].shape[1] if left else 0
        padded = [torch.full((1, width, 4), torch.nan) for _ in rows]
        for row, target in zip(rows, padded, strict=True):
            target[:, offset : offset + row.shape[1]] = row
        found = pool_features(padded, t(prompt + 1 + offset), t(completion), method, prompt_start=t(offset), norm=norm)
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)
        norm_found = float(found.norm())
        assert norm_found == pytest.approx(1.0 if completion else 0.0, abs=1e-5)


@pytest.mark.parametrize("norm", ["pooled", "token", "per_layer"])
@pytest.mark.parametrize("method", METHODS)
def test_features_against_plain_formulas(method: str, norm: str) -> None:
    a, b = torch.randn(1, 6, 3, dtype=torch.float64), 10 * torch.randn(1, 6, 3, dtype=torch.float64)
    found = pool_features([a, b], t(2), t(3), method, prompt_start=t(1), norm=norm)
    positions = {"last_token": [[4]], "completion_mean": [[2, 3, 4]], "mean_pooling": [[1, 2, 3, 4]], "concat": [[2], [3], [4]]}[method]

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[0, p].mean(0) for p in positions])

    joined = torch.cat([a, b], dim=2)
    if norm == "per_layer":
        layers = [pooled(x) / pooled(x).norm() / 2**0.5 for x in (a, b)]
        wanted = torch.cat([part for pair in zip(*(x.split(3) for x in layers), strict=True) for part in pair])
    else:
        wanted = pooled(joined / joined.norm(dim=2, keepdim=True) if norm == "token" else joined)
        wanted = wanted / wanted.norm()
    torch.testing.assert_close(found[0], wanted)


def test_half_precision_is_pooled_in_float32() -> None:
    hidden = torch.cat([torch.full((1, 1, 2), 256.0), torch.ones(1, 255, 2)], dim=1).bfloat16()
    found = pool_hidden_states(hidden, t(0), t(256), "completion_mean")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((1, 2), (256.0 + 255.0) / 256.0))


def test_pooling_refusals() -> None:
    hidden = torch.zeros(2, 4, 3)
    with pytest.raises(ConfigError, match="max_pooling"):
        pool_hidden_states(hidden, t(1, 1), t(1, 1), "max_pooling")
    with pytest.raises(ConfigError, match="prompt_start"):
        pool_hidden_states(hidden, t(1, 1), t(1, 1), "mean_pooling")
    with pytest.raises(DataError, match="row 1"):
        pool_hidden_states(hidden, t(1, 2), t(3, 3), "last_token")
    with pytest.raises(DataError, match="row 0"):
        pool_hidden_states(hidden, t(1, 1), t(1, 1), "mean_pooling", prompt_start=t(2, 0))
    with pytest.raises(ConfigError, match="ebft_feature_norm"):
        pool_features([hidden], t(1), t(1), "last_token", prompt_start=t(0), norm="layer")
    with pytest.raises(ConfigError, match="at least one feature layer"):
        pool_at_spans([], feature_spans([], [], "last_token"))


@pytest.mark.parametrize("method", METHODS)
def test_a_shared_prompt_gives_the_features_of_separate_rows(method: str) -> None:
    prompt, branches = 4, [3, 1, 6]
    states = torch.randn(prompt + sum(branches), 5, dtype=torch.float64)
    starts = [prompt, prompt + 3, prompt + 4]
    places = [Place(0, prompt, start, length) for start, length in zip(starts, branches, strict=True)]
    ranges = [TokenRange(prompt, 3), TokenRange(prompt - 1, 1), TokenRange(prompt, 5)]  # whole, only EOS, without its EOS
    spans = feature_spans(places, ranges, method)
    assert len(set(spans.positions.tolist())) == len(spans.positions) or method == "concat", "the prompt is summed once"
    found = pool_at_spans([states[spans.positions]], spans)
    for i, (start, length, wanted) in enumerate(zip(starts, branches, ranges, strict=True)):
        row = torch.cat([states[:prompt], states[start : start + length]])[None]
        alone = pool_features([row], t(wanted.start), t(wanted.length), method, prompt_start=t(0))
        torch.testing.assert_close(found[i], alone[0])


def test_no_feature_still_asks_for_a_position() -> None:
    spans = feature_spans([], [], "concat")
    assert spans.positions.tolist() == [0], "a rank without work runs a dummy forward"
    assert pool_at_spans([torch.ones(1, 2)], spans).shape == (0, 6)
