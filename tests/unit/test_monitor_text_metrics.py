"""Character n-gram F: its algebra, and values counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.monitor import char_ngram_f

texts = st.text(alphabet="ab \n", max_size=12)


def grams(text: str, order: int) -> Counter[str]:
    return Counter([text]) if 0 < len(text) < order else Counter(text[i : i + order] for i in range(len(text) - order + 1))


@given(texts, texts, st.integers(1, 4))
def test_range_symmetry_and_when_it_is_one(a: str, b: str, order: int) -> None:
    value = char_ngram_f(a, b, order)
    assert 0.0 <= value <= 1.0
    assert value == char_ngram_f(b, a, order)
    assert (value == 1.0) == (grams(a, order) == grams(b, order))


@given(texts, texts, st.integers(1, 4), st.floats(0.1, 10))
def test_it_is_the_f_measure_of_precision_and_recall(a: str, b: str, order: int, beta: float) -> None:
    left, right = grams(a, order), grams(b, order)
    matches = (left & right).total()
    if not matches:
        return
    precision, recall = matches / left.total(), matches / right.total()
    expected = (1 + beta**2) * precision * recall / (beta**2 * precision + recall)
    assert char_ngram_f(a, b, order, beta) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("", "", 1.0),
        ("", "abc", 0.0),
        ("abc", "", 0.0),
        ("ab", "ab", 1.0),
        ("ab", "abc", 0.0),
        ("abcd", "abcx", 0.5),  # abc of {abc, bcd} and {abc, bcx}
        ("aaaa", "aaa", 2 / 3),  # 2 and 1 times aaa
        ("a b", "ab", 0.0),  # whitespace counts
        ("ABC", "abc", 0.0),
    ],
)
def test_counted_by_hand(hypothesis: str, reference: str, expected: float) -> None:
    assert char_ngram_f(hypothesis, reference) == pytest.approx(expected)


def test_beta_weighs_recall() -> None:
    assert char_ngram_f("abcd", "abcdefgh", beta=2.0) < char_ngram_f("abcd", "abcdefgh") < char_ngram_f("abcd", "abcdefgh", beta=0.5)


@pytest.mark.parametrize(("order", "beta"), [(0, 1.0), (3, 0.0)])
def test_bad_arguments(order: int, beta: float) -> None:
    with pytest.raises(ValueError, match="order"):
        char_ngram_f("a", "b", order, beta)
