"""A client of the original system that acts step by step (``step_controller.py``), run as a script."""

import json
import subprocess
import sys
from pathlib import Path

import tiny

SCRIPT = Path(__file__).with_name("step_controller.py")


def test_a_controller_acts_step_by_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(SCRIPT), str(tmp_path)],
        capture_output=True, text=True, env=tiny.environment(), cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for mode in ("sync", "async"):
        assert told[f"{mode} ratings"] == [1000, 1050, 1000, 1050]
        assert (told[f"{mode} breaks"], told[f"{mode} matches"]) == ([15] * 4, [2] * 4)
        assert told[f"{mode} score agrees"]
        assert told[f"{mode} names"] == ["duel_rookie", "duel_veteran"]
        assert told[f"{mode} halves"] == [0] * 4 + [1] * 4
        assert "Bottom Quintile Total Return in duel_veteran" in told[f"{mode} metrics"]
        assert told[f"{mode} copycat"] == told[f"{mode} rounds"] == 8.0
