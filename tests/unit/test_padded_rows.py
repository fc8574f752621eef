"""Right-padded rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.packing.padded import pad_rows


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=5))
def test_rows_survive_and_padding_is_masked(rows: list[list[int]]) -> None:
    padded = pad_rows(rows)
    longest = max(map(len, rows))
    assert padded.input_ids.shape == padded.attention_mask.shape == padded.position_ids.shape == (len(rows), longest)
    for b, row in enumerate(rows):
        assert padded.input_ids[b].tolist() == row + [0] * (longest - len(row))
        assert padded.attention_mask[b].tolist() == [1] * len(row) + [0] * (longest - len(row))
        assert padded.position_ids[b].tolist() == list(range(longest))
    assert padded.real_tokens == sum(map(len, rows))


def test_no_rows_give_a_dummy_that_can_be_forwarded() -> None:
    dummy = pad_rows([])
    assert dummy.input_ids.tolist() == [[0]]
    assert dummy.attention_mask.tolist() == [[1]]
    assert dummy.position_ids.tolist() == [[0]]
