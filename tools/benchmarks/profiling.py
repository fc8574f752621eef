"""Where the time of a way goes: operators by kind, then the most expensive ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "mkldnn", "mv", "dot"),
    "attention": ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention"),
    "copies and indexing": (
        *("copy_", "cat", "clone", "index", "gather", "scatter", "slice_backward", "split", "repeat"),
        *("zero_", "fill_", "zeros", "empty"),
    ),
    "softmax": ("softmax", "logsumexp"),
}
"""By parts of an operator's name; the first kind that fits. What fits none is arithmetic element by element."""
TOP = 12


def print_profile(name: str, run: Callable[[], Any]) -> None:
    """One run under torch's profiler (CPU time; operators themselves, without those they call)."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    rows = [(event.key, event.self_cpu_time_total / 1e3, event.count) for event in recorded.key_averages()]
    total = sum(milliseconds for _, milliseconds, _ in rows)
    by_kind: dict[str, float] = {}
    for key, milliseconds, _ in rows:
        by_kind[_kind(key)] = by_kind.get(_kind(key), 0.0) + milliseconds
    print(f"\nprofile of {name}: {total:.0f} ms in operators")
    for kind, milliseconds in sorted(by_kind.items(), key=lambda item: -item[1]):
        print(f"  {kind:<28} {milliseconds:9.1f} ms {100 * milliseconds / total:5.1f} %")
    for key, milliseconds, count in sorted(rows, key=lambda row: -row[1])[:TOP]:
        print(f"    {key[:60]:<60} {milliseconds:9.1f} ms {count:7d} calls")


def _kind(key: str) -> str:
    if not key.startswith("aten::"):
        return "Python functions of autograd"
    operator = key.removeprefix("aten::").lstrip("_")
    if any(part in operator for part in KINDS["attention"]):
        return "attention"
    for kind, parts in KINDS.items():
        if any(operator == part or operator.startswith(f"{part}_") or (len(part) > 4 and part in operator) for part in parts):
            return kind
    return "element by element"
