"""How close a completion's text is to its reference."""

from __future__ import annotations

from collections import Counter


def char_ngram_f(hypothesis: str, reference: str, order: int = 3, beta: float = 1.0) -> float:
    """Character n-gram F-beta of two texts, in [0, 1].

    With G(s) the multiset of all substrings of length `order` (whitespace, case and line breaks kept as they are; a text
    shorter than `order` but not empty counts as one gram, itself) and m = |G(hypothesis) and G(reference)| with multiplicity:
    P = m / |G(hypothesis)|, R = m / |G(reference)|, F = (1 + beta^2) P R / (beta^2 P + R). Two empty texts give 1, one
    empty text gives 0. At beta = 1 it is symmetric, and 1 exactly if both multisets are equal. One order only, unlike chrF
    (Popovic 2015), which averages orders 1 to 6 without whitespace.
    """
    if order < 1 or beta <= 0:
        raise ValueError(f"char_ngram_f needs order >= 1 and beta > 0, not order={order}, beta={beta}")
    hypothesis_grams, reference_grams = _grams(hypothesis, order), _grams(reference, order)
    if not hypothesis_grams or not reference_grams:
        return float(hypothesis_grams == reference_grams)
    matches = (hypothesis_grams & reference_grams).total()
    # (1 + b^2) P R / (b^2 P + R) with both counts multiplied out: exact, and no division by zero when nothing matches
    return (1 + beta**2) * matches / (beta**2 * reference_grams.total() + hypothesis_grams.total())


def _grams(text: str, order: int) -> Counter[str]:
    if 0 < len(text) < order:
        return Counter([text])
    return Counter(text[start : start + order] for start in range(len(text) - order + 1))
