"""Every Python block of the documentation runs and prints what its page says; so do docstrings."""

import contextlib
import doctest
import importlib
import io
import math
import os
import pathlib
import pkgutil
import re

import jax
import pytest

import laplax
from laplax.estimators import ESTIMATORS

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(laplax.__path__, "laplax.")]
# A block, and what the page says it prints: a block of text that follows with nothing between.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.S | re.M)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def blocks(page):
    return [(found[1], found[2]) for found in BLOCK.finditer(page.read_text())]


def same_text(shown, printed, exact=False):
    """Words must agree; numbers to 5%, because other machines round otherwise.

    What the first page prints does not depend on that: its numbers agree to the digits shown.
    """
    if exact:
        return shown == printed
    words = [re.sub(r"\s+", "", NUMBER.sub("#", text)) for text in (shown, printed)]
    if words[0] != words[1]:
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.05, abs_tol=0.02) for a, b in pairs)


@pytest.fixture
def names_given_back():
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT))
)
@pytest.mark.usefixtures("names_given_back")
def test_the_code_on_the_page_runs(page):
    names = {"__name__": "__page__"}
    # With a folder of data the numbers are not those of the stand-in that the page shows.
    stand_in = "LAPLAX_DATA" not in os.environ or "LAPLAX_DATA" not in page.read_text()
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for code, shown in blocks(page):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page.name, "exec"), names)
            if shown is not None and stand_in:
                exact = page.name == "README.md"
                assert same_text(shown, printed.getvalue(), exact), printed.getvalue()


@pytest.mark.parametrize(
    "module",
    [
        "",
        "augmentation",
        "baselines",
        "conformal",
        "estimators",
        "fsp",
        "likelihoods",
        "metrics",
        "ood",
        "plot",
        "predictives",
        "pruning",
        "shifts",
        "standard_errors",
        "structures",
        "training",
    ],
)
def test_every_public_object_is_on_a_page_of_the_reference(module):
    home = importlib.import_module(f"laplax.{module}".rstrip("."))
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: laplax(?:\.\w+)*\.(\w+)$", text, flags=re.M))
    public = {
        name
        for name, thing in ((name, getattr(home, name)) for name in dir(home))
        if callable(thing)
        and not name.startswith("_")
        and thing.__module__.startswith(home.__name__)
    }
    assert public - shown == set()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
