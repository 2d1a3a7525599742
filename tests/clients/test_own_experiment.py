"""A client of the original system with an experiment of its own (``relay_experiment.py``), run as a script, saved and resumed."""

import json
import subprocess
import sys
from pathlib import Path

import tiny

SCRIPT = Path(__file__).with_name("relay_experiment.py")


def run(root, *argv):
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(root), *map(str, argv)],
        capture_output=True, text=True, env=tiny.environment(), cwd=root, timeout=120,
    )  # fmt: skip


def told(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_subclass_with_its_own_pool_loaders_and_loop(tmp_path):
    first = told(run(tmp_path, 3))
    assert (first["began"], first["ended"]) == ([0, 0], [2, 12])
    assert ((first["teams"], first["swaps"], first["test"]), first["memory"][1]) == ((4, 1, 3.0), 3)
    assert first["files"] == 18
    again = run(tmp_path, 5)
    assert again.returncode != 0
    assert "load_checkpoint(N)" in again.stderr  # a second run would be mixed with the first
    second = told(run(tmp_path, 5, "--ckpt", 2))
    assert (second["began"], second["ended"]) == ([3, 12], [4, 20])
    assert second["weights at start"] == first["weights"]
    assert second["moments"] != 0
    assert second["files"] == 30
    rows = tiny.rows(tmp_path / "relay")
    assert {r["section"] for r in rows} == {"val", "collect", "buffer", "train", "test"}
    assert [r["values"]["Swaps"] for r in rows if r["section"] == "train"] == [0.0] * 8 + [1.0] * 4 + [0.0] * 4 + [1.0] * 4
