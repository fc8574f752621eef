"""The numbers of one evaluation on preference rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebft_ds.rewards.calibration import CalibrationBin

SCALARS = {
    "accuracy": "accuracy",
    "tie_share": "tie_share",
    "margin": "margin",
    "loss": "loss",
    "chosen_mean": "chosen_mean",
    "chosen_std": "chosen_std",
    "rejected_mean": "rejected_mean",
    "rejected_std": "rejected_std",
    "mean": "reward_mean",
    "std": "reward_std",
    "best_of_n_accuracy": "best_of_n_accuracy",
    "ece": "ece",
    "pairs": "pairs",
    "rows": "rows",
}
"""Field -> the end of its metric key."""


@dataclass(frozen=True)
class PreferenceResults:
    """Over all rows. Where a row ranks K > 2 responses, its best is the chosen one, the others are rejected, and it has K (K - 1) / 2
    pairs. NaN: nothing to take a mean of. Encodable by msgspec (NaN as null in JSON)."""

    accuracy: float
    """Pairs that the rewards order as labelled, ties as half; pairs that are labelled a tie (preference 0.5) are left out."""
    tie_share: float
    """Pairs with equal rewards."""
    margin: float
    """Mean of r_chosen - r_rejected over pairs."""
    loss: float
    """Of training, per pair, or (plackett_luce) per row."""
    chosen_mean: float
    chosen_std: float
    rejected_mean: float
    rejected_std: float
    mean: float
    """Of the rewards of all responses."""
    std: float
    """Standard deviations are unbiased."""
    best_of_n_accuracy: float
    """Rows of K > 2 whose best response has the highest reward, 1/m where m share it; NaN without such rows."""
    ece: float
    """Expected calibration error of sigmoid(|r_chosen - r_rejected|)."""
    bins: list[CalibrationBin]
    subsets: dict[str, tuple[float, int]]
    """Subset -> (accuracy, rows)."""
    sections: dict[str, float]
    """Section -> mean accuracy of its subsets, weighted by rows (see reward_bench)."""
    pairs: int
    rows: int

    def to_metrics(self, prefix: str = "eval/") -> dict[str, float]:
        """The numbers that were measured, as keys: `eval/accuracy`, ..., `eval/subset/<name>`, `eval/section/<name>`."""
        values = {f"{prefix}{key}": float(getattr(self, name)) for name, key in SCALARS.items()}
        values |= {f"{prefix}subset/{name}": accuracy for name, (accuracy, _) in self.subsets.items()}
        values |= {f"{prefix}section/{name}": accuracy for name, accuracy in self.sections.items()}
        return {key: value for key, value in values.items() if not math.isnan(value)}

    def table(self) -> str:
        """Lines for a terminal."""
        lines = [
            ("accuracy", f"{self.accuracy:.4f}", f"{self.pairs} pairs of {self.rows} rows, {self.tie_share:.2%} ties"),
            ("loss", f"{self.loss:.4f}", ""),
            ("margin", f"{self.margin:.4f}", "chosen - rejected"),
            ("chosen", f"{self.chosen_mean:.4f}", f"± {self.chosen_std:.4f}"),
            ("rejected", f"{self.rejected_mean:.4f}", f"± {self.rejected_std:.4f}"),
            ("calibration error", f"{self.ece:.4f}", f"{len(self.bins)} bins"),
        ]
        if not math.isnan(self.best_of_n_accuracy):
            lines.append(("best of N", f"{self.best_of_n_accuracy:.4f}", "rows of more than two responses"))
        lines += [(f"section {name}", f"{accuracy:.4f}", "") for name, accuracy in self.sections.items()]
        lines += [(f"subset {name}", f"{accuracy:.4f}", f"{count} rows") for name, (accuracy, count) in self.subsets.items()]
        width = max(len(label) for label, _, _ in lines)
        return "\n".join(f"{label:<{width}}  {value:>9}  {more}".rstrip() for label, value, more in lines)
