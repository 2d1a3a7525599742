"""docs/notes/original_facts.md: its count, the adapters and the rows of docs/original.md that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "notes" / "original_facts.md").read_text(encoding="utf-8")
FACTS = re.findall(r"^- .*$", PAGE, re.MULTILINE)
DIFFERENCES = [re.search(r'\*\*differs\*\*: "(.*)"$', fact) for fact in FACTS if "**differs**" in fact]
ADAPTERS = [re.search(r" \(`([a-z_.]+)`\)$", fact) for fact in FACTS if fact.endswith("`)")]


def test_differences_are_rows_of_the_page_for_users():
    lines = (ROOT / "docs" / "original.md").read_text(encoding="utf-8").splitlines()
    subjects = {line.split(" | ")[0].removeprefix("| ") for line in lines}
    assert {found[1] for found in DIFFERENCES} <= subjects


def test_adapters_exist():
    modules = {found[1] if found[1].startswith("amago.") else f"amago.compat.{found[1]}" for found in ADAPTERS if found}
    assert {m for m in modules if not (ROOT / f"{m.replace('.', '/')}.py").exists()} == set()


def test_the_count_at_the_top():
    counts = [int(n) for n in re.findall(r"(\d+)\*?\*? (?:facts|natively|by an adapter|differ)", PAGE.partition("## ")[0])]
    adapters = sum(bool(found) for found in ADAPTERS)
    assert counts == [len(FACTS), len(FACTS) - adapters - len(DIFFERENCES), adapters, len(DIFFERENCES)]
