"""Facts that code for the original system relies on, each in a process of its own: names (`NAMES`), and what they do (``facts/*.py``).

A file of facts is a sequence of pieces, each after a line ``# fact: TITLE``; what stands before the first is put in front of each.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

HERE = Path(__file__).parent
NAMES = {}  # by their modules
for name in (HERE / "facts" / "names.txt").read_text().split():
    NAMES.setdefault(name.rpartition(".")[0], []).append(name)
FACTS = {}
for file in sorted(HERE.glob("facts/*.py")):
    before, *pieces = file.read_text().split("\n# fact: ")
    FACTS |= {f"{file.stem}: {piece.partition(chr(10))[0]}": f"{before}\n{piece.partition(chr(10))[2]}" for piece in pieces}


@pytest.fixture(scope="module")
def outcomes():
    """{module or title: traceback, or "" where it holds}."""
    pieces = {module: "\n".join(["import amago", *names]) for module, names in NAMES.items()} | FACTS
    command = [sys.executable, str(HERE / "in_fresh_processes.py")]
    done = subprocess.run(
        command, input=json.dumps(pieces), capture_output=True, text=True, env=tiny.environment(), timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_names_are_attributes_after_import_amago(outcomes):
    assert {module: outcomes[module] for module in NAMES if outcomes[module]} == {}


@pytest.mark.parametrize("fact", FACTS)
def test_holds(fact, outcomes):
    assert not outcomes[fact], outcomes[fact]


def test_environments_may_import_the_helpers_in_processes_without_torch():
    code = "import sys; from amago.utils import AmagoWarning, amago_warning, call_async_env; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
