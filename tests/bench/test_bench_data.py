"""Each benchmark of data, start-up and learning runs, and says what it must. Nothing is timed here."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
KEYS = {"case", "ours", "unit", "ceiling", "ratio", "machine", "commit", "threads"}
CASES = {
    "replay": ("segments, warm", "npz, warm", "cold", "batches of 24", "writing", "first seen", "known", "images", "floats"),
    "startup": ("import amago", "first step", "idle pool"),
    "solve": ("CartPole-v1", "recall", "Meta-FrozenLake", "RoomKeyDoor", "T-Maze"),
    "scaling": ("actors", "sequences", "wide", "opening", "slice"),
    "compiled": ("policy_step",),
    "cluster": ("CartPole, 1 ms a step",),
    "fast_paths": ("critics in blocks", "classified returns in blocks", "packed linear layers"),
}
MORE = {"compiled": ("--only", "policy_step")}  # updates take a minute to compile


@pytest.mark.parametrize("name", CASES)
def test_smoke(name, tmp_path):
    command = [sys.executable, "-m", "benchmarks", name, "--smoke", "--out", str(tmp_path), *MORE.get(name, ())]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / f"{name}.json").read_text())
    for row in rows:
        assert row.keys() >= KEYS
        assert all(math.isfinite(row[k]) and row[k] > 0 for k in ("ours", "ceiling", "ratio"))
    for part in CASES[name]:
        assert any(part in row["case"] for row in rows), part
    assert (tmp_path / "scaling.png").exists() == (name == "scaling")


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_ceiling_of_replay_reads_the_very_bytes(benchmarks, tmp_path):
    from amago.store import TrajectoryStore
    from benchmarks import replay

    replay.write(replay.TINY[0], tmp_path, "segments")
    store = TrajectoryStore(tmp_path)
    store.refresh()
    slices = replay.Slices(store, 5)
    for (index, start), ranges in zip(slices.asked, slices.ranges):
        traj = store.read(index, start, start + replay.SLICE)
        raw = sorted(os.pread(fd, n, at) for fd, at, n in ranges)
        arrays = (*traj.obs.values(), traj.actions, traj.rews, traj.dones)
        assert raw == sorted(a.tobytes() for a in arrays)
    slices.close()


def test_recall_pays_for_the_card_of_four_steps_ago(benchmarks):
    from benchmarks.recall import DECK, RepeatPrevious

    with pytest.raises(ValueError, match="k must lie in"):
        RepeatPrevious(k=0)
    for right, total in ((True, 1.0), (False, -1.0)):
        env = RepeatPrevious()
        assert isinstance(env.observation_space, gym.spaces.Box)
        seen = [int(env.reset(seed=3)[0][:4].argmax())]
        returned, steps, done = 0.0, 0, False
        while not done:
            answer = seen[-1 - env.k] if len(seen) > env.k else 0
            obs, reward, done, truncated, _ = env.step(answer if right else (answer + 1) % 4)
            assert not truncated
            seen.append(int(obs[:4].argmax()))
            returned, steps = returned + reward, steps + 1
        assert (steps, sorted(np.bincount(seen))) == (DECK - 1, [DECK // 4] * 4)
        assert returned == pytest.approx(total)


def test_a_score_must_be_reached_twice(benchmarks):
    from benchmarks import solve

    experiment = object.__new__(solve.TimedExperiment)
    experiment.score, again = 10.0, []
    experiment.evaluate_val = lambda: again.append(1)
    point = solve.Point(1.0, 1.0, 1, 1, 12.0)
    experiment._confirm(point._replace(score=9.0))
    assert again == []
    experiment._confirm(point)
    assert again == [1]
    experiment._confirm(point._replace(score=7.0))  # the mean is 9.5
    experiment._confirm(point)
    with pytest.raises(solve.Solved):
        experiment._confirm(point._replace(score=9.9))
