"""docs/notes/original_facts.md: what code for the original relies on, each fact with the test that shows it."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "notes" / "original_facts.md"
DIFFERENCES = ROOT / "docs" / "original.md"
KINDS = {"natively", "adapter", "differs", "open"}


def facts():
    """(fact, here, shown by) of each row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.replace("| |", "|  |").strip("|").split(" | ")] for line in lines]
    return [tuple(row[:3]) for row in cells if row[0] not in ("fact", "---")]


@cache
def names_in(path):
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("fact", "here", "shown"), facts(), ids=[fact[:60] for fact, _, _ in facts()])
def test_each_fact_says_whether_it_holds_and_which_test_shows_it(fact, here, shown):
    kind, _, which = here.partition(": ")
    assert kind in KINDS, fact
    if kind == "open":
        assert not shown, "a fact that a test shows is not open"
        return
    path, _, name = shown.partition("::")
    assert name in names_in(ROOT / "tests" / path), f"{fact}: there is no {shown}"
    if kind == "adapter":
        module = which.strip("`")
        assert module == "amago.utils" or (ROOT / "amago" / "compat" / f"{module}.py").exists(), which
    elif kind == "differs":
        subjects = [line.split(" | ")[0].removeprefix("| ") for line in DIFFERENCES.read_text(encoding="utf-8").splitlines()]
        assert which.strip('"') in subjects, f"docs/original.md has no row {which}"


def test_the_count_at_the_top():
    counts = Counter(here.partition(":")[0] for _, here, _ in facts())
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    found = {kind: int(n) for n, kind in re.findall(r"\*\*(\d+)\*\* (natively|by an adapter|differ|open)", text)}
    names = {"natively": "natively", "adapter": "by an adapter", "differs": "differ", "open": "open"}
    assert found == {names[kind]: n for kind, n in counts.items()}
    assert f"Of {sum(counts.values())} facts" in text
