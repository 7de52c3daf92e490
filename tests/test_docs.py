"""Every Python block of the documentation runs, and the docstrings' examples are true."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import jax
import pytest

import laplax
from laplax.estimators import ESTIMATORS

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(laplax.__path__, "laplax.")]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M)


@pytest.fixture
def names_given_back():
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
@pytest.mark.usefixtures("names_given_back")
def test_the_code_on_the_page_runs(page):
    code = "\n".join(blocks(page))
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        exec(compile(code, page.name, "exec"), {"__name__": "__page__"})
    assert code


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
