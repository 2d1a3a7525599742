"""The benchmarks of the learner run, and say what they should."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"case", "ours", "unit", "ceiling", "ratio", "machine", "commit", "threads"}
KINDS = (
    "Agent, discrete (5)", "Agent, continuous (1-D)", "Agent, continuous (6-D)", "MultiTaskAgent, discrete (5)",
    "MultiTaskAgent, continuous (6-D)",
)  # fmt: skip
CASES = {f"{kind}, length 4, {precision}" for kind in KINDS for precision in ("float32", "bf16")}


@pytest.mark.parametrize(("name", "only", "expected"), [
    ("learner", "", CASES),
    ("learner_memory", "6-D), length 4, float32", {c for c in CASES if "6-D" in c and "float32" in c}),
])  # fmt: skip
def test_smoke(name, only, expected, tmp_path):
    command = [sys.executable, "-m", "benchmarks", name, "--smoke", "--only", only, "--out", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / f"{name}.json").read_text())
    assert {row["case"] for row in rows} == expected
    for row in rows:
        assert row.keys() >= KEYS
        assert math.isfinite(row["ratio"])
        assert row["ratio"] > 0
        assert row["ours"] > 0
        assert row["ceiling"] > 0
        assert row["case"] in run.stdout
