"""The public names, and that loading the package stays cheap."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ebft_ds

PACKAGE = Path(ebft_ds.__file__).parent


def test_every_public_name_has_a_home() -> None:
    assert set(ebft_ds.__all__) == {*ebft_ds._HOMES, "__version__"}
    for name, module in ebft_ds._HOMES.items():
        path = PACKAGE.parent / (module.replace(".", "/") + ".py")
        assert path.is_file() or (path.with_suffix("") / "__init__.py").is_file(), f"{name}: there is no {module}"


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AsyncEbft'"):
        _ = ebft_ds.AsyncEbft


def test_every_folder_is_a_package() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
