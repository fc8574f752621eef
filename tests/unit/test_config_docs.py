"""The generated pages are what the code says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from ebft_ds.config.fields import FIELDS

ROOT = Path(__file__).resolve().parent.parent.parent


def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_fresh() -> None:
    assert make_docs().stale_pages() == [], "run `make docs`"


def test_every_field_is_on_the_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert all(f"| `{name}` |" in page for name in FIELDS)
