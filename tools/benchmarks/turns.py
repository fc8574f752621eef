"""Fair comparisons: the variants run in turns, several times, and medians are compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

Measurement = dict[str, float]
"""Quantity (with its unit in the name) -> value."""


@dataclass(frozen=True)
class Report:
    """What a benchmark found."""

    benchmark: str
    settings: dict[str, str | int | float]
    medians: dict[str, Measurement]
    """By variant."""
    samples: dict[str, list[Measurement]]
    ratios: dict[str, float] = field(default_factory=dict)
    """Median of the rounds' ratios: what disturbs the machine for a while disturbs both sides of a round."""


def in_turns(variants: Mapping[str, Callable[[], Measurement]], rounds: int) -> dict[str, list[Measurement]]:
    """Each variant once a round; the order is turned around from round to round."""
    samples: dict[str, list[Measurement]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants) if number % 2 == 0 else list(variants)[::-1]:
            samples[name].append(variants[name]())
    return samples


def medians(samples: Mapping[str, list[Measurement]]) -> dict[str, Measurement]:
    return {name: {key: statistics.median(m[key] for m in found) for key in found[0]} for name, found in samples.items()}


def ratio(samples: Mapping[str, list[Measurement]], quantity: str, of: str, to: str) -> float:
    """Median over the rounds of `quantity` of one variant over that of another."""
    pairs = zip(samples[of], samples[to], strict=True)
    return statistics.median(one[quantity] / other[quantity] for one, other in pairs)


def show(report: Report, json_file: Path | None) -> None:
    """A table on stdout, and everything as JSON if a file is given."""
    print(f"{report.benchmark}: " + ", ".join(f"{name} {value}" for name, value in report.settings.items()))
    quantities = list(dict.fromkeys(key for found in report.medians.values() for key in found))
    width = max(map(len, [*report.medians, "median of"]))
    print("median of".ljust(width), *(q.rjust(max(12, len(q))) for q in quantities))
    for name, found in report.medians.items():
        values = (f"{found[q]:.4g}" if q in found else "-" for q in quantities)
        print(name.ljust(width), *(value.rjust(max(12, len(q))) for q, value in zip(quantities, values, strict=True)))
    for name, value in report.ratios.items():
        print(f"{name}: {value:.4g}")
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
