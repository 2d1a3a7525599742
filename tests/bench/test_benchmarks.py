"""Each benchmark runs at its tiny sizes and writes what it should, never how fast; and its parts measure what they say."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cluster_check, cluster_sizes
from benchmarks.__main__ import main
from benchmarks.cluster_model import MEASURED, Constants
from benchmarks.peer import Peer, PeerError

ROOT = Path(__file__).parents[2]
KEYS = {"case", "ours", "unit", "ceiling", "ratio", "machine", "commit", "threads", "peer", "ratio_to_peer"}


@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """A function that runs a benchmark at its tiny sizes and returns its rows by case, checked."""
    before = torch.get_num_threads()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(name, *arguments):
        assert main([name, "--smoke", "--out", str(tmp_path), *arguments]) == 0
        rows = json.loads((tmp_path / f"{'cluster_constants' if '--constants' in arguments else name}.json").read_text())
        for row in rows:
            assert row.keys() >= KEYS
            assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("ours", "ceiling", "ratio")), row["case"]
            assert row["machine"]
            assert row["commit"]
            assert (row["peer"] is None) == (row["ratio_to_peer"] is None)
        by_case = {row["case"]: row for row in rows}
        assert len(by_case) == len(rows), "each case has a name of its own"
        return by_case

    yield run
    torch.set_num_threads(before)


CASES = {
    "policy_step": ("FF", "GRU", "Transformer"),
    "rollout": ("FF, sync", "GRU, async", "environments alone", "recorded"),
    "context": ("context 8, empty, float32", "context 16, full, bfloat16", "step 160 against step 24"),
    "learner": ("Agent, discrete (5), length 4, float32", "Agent, continuous (6-D), length 4, bf16", "MultiTaskAgent, discrete (5), length 4, bf16"),
    "replay": ("segments, warm", "npz, warm", "cold", "batches of 24", "writing", "first seen", "known", "images", "floats"),
    "startup": ("import amago", "first step", "idle pool"),
    "solve": ("CartPole-v1", "recall", "Meta-FrozenLake", "RoomKeyDoor", "T-Maze"),
    "scaling": ("actors", "sequences", "wide", "opening", "slice"),
    "compiled": ("policy_step",),
    "fast_paths": ("critics in blocks", "classified returns in blocks"),
    "replay_size": ("first seen", "known", "memory", "a look", "a batch, uniform, cold", "a batch, priority", "first batch, length"),
}  # fmt: skip
MORE = {"compiled": ("--only", "policy_step"), "rollout": ("--only", "CartPole")}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's compiler
@pytest.mark.parametrize("name", CASES)
def test_smoke(name, smoke, tmp_path, monkeypatch):
    compiled = torch.compile  # whose C++ takes a minute
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="eager"))
    rows = smoke(name, *MORE.get(name, ()))
    assert [part for part in CASES[name] if not any(part in case for case in rows)] == []
    assert (tmp_path / "scaling.png").exists() == (name == "scaling")


def test_memory_of_the_learner(smoke):
    assert smoke("learner_memory", "--only", "MultiTaskAgent, continuous (6-D), length 4, float32")


def test_the_constants_are_measured_and_kept(smoke, tmp_path):
    cases = smoke("cluster", "--constants")
    for part in ("from a bus", "bundling", "a look", "publication", "loading", "sequences", "a learner", "memory"):
        assert any(part in case for case in cases), part
    constants = Constants.load_from(tmp_path / MEASURED.name)
    assert 0 < constants.copy_rate < math.inf, "infinite is what was not measured"
    assert constants.start > 0.1
    assert constants.memory > 5e7
    run, _ = cluster_check.described(tmp_path / MEASURED.name)
    assert run["step"] >= 0.04, "two environments sleep 20 ms each"
    assert run["update"] >= 0.2


def test_a_real_launch_is_compared_with_its_simulation(smoke):
    rows = smoke("cluster_check")
    assert {case.partition(", ")[2] for case in rows} == {"steps/s", "updates/s", "updates/step", "versions of lag", "s of lag"}
    assert rows["1 collector, updates/step"]["ours"] <= 2 * cluster_check.LIMITS.most, "the learner waits for one collector"


def test_a_launch_of_ones_own_is_simulated(capsys):
    cluster_sizes.main(["--collectors", "3", "--update", "0.2", "--limits", "0.01:0.05"])
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("closed form", "learner waits", "| 3 |"))


def test_each_row_has_both(smoke, tmp_path):
    """The peer is a copy of the package that says where it was imported."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "amago", checkout / "amago", ignore=shutil.ignore_patterns("__pycache__"))
    with open(checkout / "amago" / "__init__.py", "a") as f:
        f.write(f"\nopen({str(checkout / 'imported')!r}, 'w').close()\n")
    (row,) = smoke("policy_step", "--only", "Transformer", "--peer", str(checkout), "--peer-python", sys.executable).values()
    assert row["peer"] is not None
    assert (checkout / "imported").exists(), "the copy was measured, not the package that is installed"


def test_what_goes_wrong_there_is_told(smoke, tmp_path):
    (tmp_path / "amago").mkdir()
    program = "import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(3)"
    (tmp_path / "amago" / "__init__.py").write_text(program)
    with pytest.raises(PeerError, match="last words"):
        Peer(str(tmp_path), sys.executable, {"benchmark": "policy_step", "threads": 1, "traj": "FF"})
