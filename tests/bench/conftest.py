"""Smoke tests of benchmarks: that they run, and write what they should; never how fast."""

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
KEYS = {"case", "ours", "unit", "ceiling", "ratio", "machine", "commit", "threads", "peer", "ratio_to_peer"}


@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """A function that runs a benchmark at its tiny sizes and returns its rows by case, checked."""
    import torch

    before = torch.get_num_threads()
    monkeypatch.chdir(ROOT)

    def run(name, *arguments):
        from benchmarks.__main__ import main

        assert main([name, "--smoke", "--out", str(tmp_path), *arguments]) == 0
        rows = json.loads((tmp_path / f"{name}.json").read_text())
        for row in rows:
            assert row.keys() >= KEYS
            for key in ("ours", "ceiling", "ratio"):
                assert math.isfinite(row[key]), (row["case"], key)
                assert row[key] > 0, (row["case"], key)
            assert row["threads"] == 1
            assert row["machine"]
            assert row["commit"]
            assert (row["peer"] is None) == (row["ratio_to_peer"] is None)
            assert row["peer"] is None or (row["peer"] > 0 and math.isfinite(row["ratio_to_peer"]))
        by_case = {row["case"]: row for row in rows}
        assert len(by_case) == len(rows), "each case has a name of its own"
        return by_case

    yield run
    torch.set_num_threads(before)
