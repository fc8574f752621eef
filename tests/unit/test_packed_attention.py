"""Back ends of packed attention against a softmax written out by hand, on random layouts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebft_ds.errors import ConfigError
from ebft_ds.packing.attention import packed_attention
from ebft_ds.packing.attention.choice import DENSE_BELOW
from ebft_ds.packing.attention.dense import DenseAttention
from ebft_ds.packing.attention.flex import BLOCK, FlexAttention, block_mask
from ebft_ds.packing.attention.split import SplitAttention
from ebft_ds.packing.attention.visibility import TokenMap
from ebft_ds.packing.packed import PackedAttention, PackedGroup, PackedLayout

BACKENDS = {"split": SplitAttention, "dense": DenseAttention, "flex": FlexAttention}


def layout_of(*groups: tuple[int, tuple[int, ...]]) -> PackedLayout:
    starts = itertools.accumulate((prompt + sum(branches) for prompt, branches in groups), initial=0)
    return PackedLayout(tuple(PackedGroup(start, prompt, branches) for start, (prompt, branches) in zip(starts, groups, strict=False)))


def written_out(
    layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """float64, one query at a time, over an explicit list of the keys it sees: [1, T, Hq, D]."""
    seen_by: list[list[tuple[int, int]]] = []  # (index of the key, distance) of each query
    for group in layout.groups:
        prompt = [(group.start + p, p) for p in range(group.prompt_length)]
        index = group.start
        for length in (0, *group.branch_lengths):
            own = prompt if length == 0 and index == group.start else [(index + i, group.prompt_length + i) for i in range(length)]
            for count, (_, position) in enumerate(own, start=1):
                keys = own[:count] if own is prompt else prompt + own[:count]
                seen_by.append([(k, position - p) for k, p in keys])
            index += len(own)
    all_keys, all_values = (x[0].double().repeat_interleave(query.shape[1] // key.shape[1], dim=0) for x in (key, value))
    rows = []
    for q, seen in enumerate(seen_by):
        keys = [k for k, distance in seen if window is None or distance < window]
        scores = torch.einsum("hd,hkd->hk", query[0, :, q].double(), all_keys[:, keys]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hk,hkd->hd", torch.softmax(scores, -1), all_values[:, keys]))
    return torch.stack(rows)[None]


def tensors(total: int, heads: tuple[int, int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, total, count, 8) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]


GROUPS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 4), max_size=3).map(tuple)), min_size=1, max_size=3
)  # fmt: skip


@settings(max_examples=40)
@given(
    GROUPS,
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.none() | st.integers(1, 7),
    st.none() | st.just(2.0),
    st.sampled_from([None, 0.7]),
    st.integers(0, 1000),
)
def test_back_ends_equal_the_written_out_softmax(
    groups: list[tuple[int, tuple[int, ...]]],
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    scaling: float | None,
    seed: int,
) -> None:
    layout = layout_of(*groups)
    assume(layout.length > 0)
    inputs = tensors(layout.length, heads, seed)
    weights = torch.randn(1, layout.length, heads[0], 8, generator=torch.Generator().manual_seed(seed + 1))
    wanted = written_out(layout, *inputs, scaling=1 / math.sqrt(8) if scaling is None else scaling, window=window, softcap=softcap)
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), inputs)
    for name, backend in BACKENDS.items():
        given_inputs = [x.detach() for x in inputs] if name == "flex" else inputs
        found = backend(layout)(*given_inputs, scaling=scaling, dropout=0.0, sliding_window=window, softcap=softcap)
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        if name == "flex":
            continue
        for gradient, other in zip(torch.autograd.grad((found * weights).sum(), inputs), wanted_gradients, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_one_attention_serves_layers_with_and_without_a_window() -> None:
    layout = layout_of((6, (4, 3)), (5, ()))
    inputs = [x.detach() for x in tensors(layout.length, (4, 2), 0)]
    for name, backend in BACKENDS.items():
        attention = backend(layout)
        for window in (3, None, 5, 3):
            wanted = written_out(layout, *inputs, scaling=0.5, window=window, softcap=None).float()
            found = attention(*inputs, scaling=0.5, dropout=0.0, sliding_window=window, softcap=None)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", ["split", "dense"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_dropout_drops_and_rescales_attention_weights(backend: str, softcap: float | None) -> None:
    layout = layout_of((40, (30, 20)))
    query, key, value = (x.detach() for x in tensors(layout.length, (2, 2), 0))
    torch.manual_seed(0)
    output = BACKENDS[backend](layout)(query, key, torch.ones_like(value), scaling=None, dropout=0.5, sliding_window=None, softcap=softcap)
    assert output.std() > 0.05  # without dropout every output is a mean of ones
    assert abs(float(output.mean()) - 1) < 0.1


def test_flex_refuses_dropout() -> None:
    layout = layout_of((3, (2, 2)))
    with pytest.raises(ConfigError, match="dropout"):
        FlexAttention(layout)(*tensors(7, (2, 2), 0), scaling=None, dropout=0.1, sliding_window=None, softcap=None)


@pytest.mark.parametrize("window", [None, 300])
def test_block_mask_is_the_one_torch_finds_from_all_of_the_mask(window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    layout = layout_of((300, (150, 20, 7, 128)), (129, ()), (64, (64, 1)))
    tokens = TokenMap.of(layout, "cpu")
    found = block_mask(tokens, window)
    wanted = create_block_mask(found.mask_mod, None, None, layout.length, layout.length, "cpu", BLOCK)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert int(found.full_kv_num_blocks.sum()) > 0


def test_the_back_end_is_chosen_by_device_and_length() -> None:
    def kind(name: str, device: str, length: int) -> type[PackedAttention]:
        return type(packed_attention(name, device=device)(layout_of((length, ()))))  # type: ignore[arg-type]

    assert kind("auto", "cpu", DENSE_BELOW - 1) is DenseAttention
    assert kind("auto", "cpu", DENSE_BELOW) is SplitAttention
    assert kind("auto", "cuda", BLOCK) is FlexAttention
    assert kind("auto", "cuda", BLOCK - 1) is DenseAttention
    assert [kind(name, "cpu", 500) for name in BACKENDS] == list(BACKENDS.values())


@pytest.mark.parametrize("transposed", [0, 1, 2])
def test_inputs_of_any_memory_layout_are_read_rightly(transposed: int) -> None:
    layout = layout_of((3, (2, 2)))
    inputs = [x.detach() for x in tensors(layout.length, (2, 1), 0)]
    inputs[transposed] = inputs[transposed].transpose(2, 3).contiguous().transpose(2, 3)
    found = SplitAttention(layout)(*inputs, scaling=0.3, dropout=0.0, sliding_window=None, softcap=None)
    query, key, value = inputs
    wanted = written_out(layout, query, key, value, scaling=0.3, window=None, softcap=None)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
