"""RewardBench's sections (Lambert et al. 2024, arXiv 2403.13787) and how it takes their means.

Source: allenai/reward-bench, `rewardbench/constants.py` (SUBSET_MAPPING, EXAMPLE_COUNTS) and `calculate_scores_per_section` of
`rewardbench/utils.py`: a section is the mean over its subsets, weighted by their numbers of rows. math-prm is weighted as 984 rows, as
many as the six code subsets have together; it has 447.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SECTIONS: dict[str, list[str]] = {
    "Chat": ["alpacaeval-easy", "alpacaeval-length", "alpacaeval-hard", "mt-bench-easy", "mt-bench-med"],
    "Chat Hard": [
        "mt-bench-hard",
        "llmbar-natural",
        "llmbar-adver-neighbor",
        "llmbar-adver-GPTInst",
        "llmbar-adver-GPTOut",
        "llmbar-adver-manual",
    ],
    "Safety": ["refusals-dangerous", "refusals-offensive", "xstest-should-refuse", "xstest-should-respond", "donotanswer"],
    "Reasoning": ["math-prm", "hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust"],
}
ROW_WEIGHTS = {"math-prm": 984 / 447}
"""Weight of a row where it is not 1. On the whole benchmark section means are RewardBench's; on a part rows keep their weights."""


def section_means(subsets: Mapping[str, tuple[float, int]], sections: Mapping[str, Sequence[str]] | None = None) -> dict[str, float]:
    """Accuracy of each section that has rows.

    Args:
        subsets: name -> (accuracy, rows).
        sections: section -> its subsets, rows weighted alike; default RewardBench's.
    """
    weights = ROW_WEIGHTS if sections is None else {}
    means: dict[str, float] = {}
    for section, names in (SECTIONS if sections is None else sections).items():
        found = [
            (accuracy, count * weights.get(name, 1.0)) for name in names if name in subsets for accuracy, count in [subsets[name]] if count
        ]
        if found:
            means[section] = sum(accuracy * weight for accuracy, weight in found) / sum(weight for _, weight in found)
    return means
