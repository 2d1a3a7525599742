"""docs/original.md, its facts, ``zoo/original`` and the golden vectors tell one story: the behaviour of the original system."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import gin
import golden
import pytest
import tiny

from amago import config

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "original.md"
COLUMNS = ["subject", "original system", "amago", "reason", "switch"]
SETTINGS = [
    " ".join(line.split())
    for line in (ROOT / "amago" / "zoo" / "original.gin").read_text().splitlines()
    if line.strip() and not line.startswith(("#", "import "))
]
GOLDEN_TESTS = ["tests/nets/test_golden_nets.py", "tests/agent/test_golden_agent.py", "tests/test_ops.py"]


def rows():
    """All rows of the page's tables, each a list of cells."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (x.replace("| |", "|  |") for x in lines)]
    return [row for row in cells if row != COLUMNS and not set("".join(row)) <= set("-| ")]


def switches():
    return [" ".join(code.split()) for row in rows() for code in re.findall(r"`([^`]+)`", row[-1])]


def test_every_row_is_complete():
    assert len(rows()) >= 9
    for row in rows():
        assert len(row) == len(COLUMNS), row
        assert all(row[:-1]), row


def test_the_settings_are_those_of_the_page():
    assert SETTINGS, "zoo/original binds nothing"
    assert sorted(SETTINGS) == sorted(switches())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_exists_and_is_not_the_default(setting):
    config.parse_files(["zoo/original"])
    selector, _, parameter = setting.partition(" = ")[0].rpartition(".")
    bound = gin.query_parameter(f"{selector}.{parameter}")
    full = next(name for name in config.bindings() if name.endswith(f"{selector}.{parameter}")).rpartition(".")[0]
    configurable = config.registry()[full].wrapped
    signature = inspect.signature(configurable.__init__ if inspect.isclass(configurable) else configurable)
    by_run = parameter == "steps_anneal"  # a run shortens it unless it is bound, also to the default
    assert by_run or bound != signature.parameters[parameter].default, "amago does this anyway: delete the row and the setting"


@pytest.mark.skipif(not golden.directory().is_dir(), reason="no golden vectors")
def test_golden_vectors_hold_with_the_settings():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "original_defaults", *GOLDEN_TESTS]
    environment = tiny.environment() | {"AMAGO_GOLDEN": str(golden.directory())}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1]


NOTES = (ROOT / "docs" / "notes" / "original_facts.md").read_text(encoding="utf-8")
FACTS = re.findall(r"^- .*$", NOTES, re.MULTILINE)
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
    counts = [int(n) for n in re.findall(r"(\d+)\*?\*? (?:facts|natively|by an adapter|differ)", NOTES.partition("## ")[0])]
    adapters = sum(bool(found) for found in ADAPTERS)
    assert counts == [len(FACTS), len(FACTS) - adapters - len(DIFFERENCES), adapters, len(DIFFERENCES)]
