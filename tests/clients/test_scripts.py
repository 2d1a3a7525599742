"""Scripts written for the original system, each run as it is in a process of its own: they train, evaluate, and check what they rely on."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny

SCRIPTS = sorted(p for p in Path(__file__).parent.glob("scripts/*.py") if p.stem != "small")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_runs(script, tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", str(script), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=tiny.environment(), timeout=120)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
