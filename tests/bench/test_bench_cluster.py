"""The benchmarks of launches and of big stores run, and their parts measure what they say. Nothing is timed here."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amago.store import TrajectoryStore
from benchmarks import cluster_check, cluster_constants, cluster_sizes, replay_size
from benchmarks.__main__ import main
from benchmarks.cluster_model import MEASURED, Constants

ROOT = Path(__file__).parent.parent.parent


def smoke(out, *words):
    command = [sys.executable, "-m", "benchmarks", *words, "--smoke", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=290, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((out / f"{'cluster_constants' if '--constants' in words else words[0]}.json").read_text())
    assert all(math.isfinite(row[key]) and row[key] > 0 for row in rows for key in ("ours", "ceiling", "ratio")), rows
    assert len({row["case"] for row in rows}) == len(rows)
    return rows


def test_the_constants_are_measured_and_kept(tmp_path):
    cases = [row["case"] for row in smoke(tmp_path, "cluster", "--constants")]
    for part in ("from another node", "on one machine", "a look", "publication", "loading", "sequences", "a learner", "memory"):
        assert any(part in case for case in cases), part
    constants = Constants.load_from(tmp_path / MEASURED.name)
    assert 0 < constants.copy_rate < math.inf, "infinite is what was not measured"
    assert constants.start > 0.1
    assert constants.memory > 5e7
    run, _ = cluster_check.described(tmp_path / MEASURED.name)
    assert run["step"] >= 0.04, "two environments sleep 20 ms each"
    assert run["update"] >= 0.2


def test_every_file_of_a_measurement_arrives(tmp_path):
    arriving = cluster_constants.Arriving(tmp_path)
    for _ in range(2):
        arriving.copied(4, 4_000)
        arriving.moved(3, 3_000)
    arriving.ingest.close()
    assert len(list((tmp_path / "buffer" / "fifo").glob("*.safetensors"))) == 14, "files of one name would arrive once"


def test_a_real_launch_is_compared_with_its_simulation(tmp_path):
    rows = {row["case"]: row for row in smoke(tmp_path, "cluster_check")}
    assert {case.partition(", ")[2] for case in rows} == {"steps/s", "updates/s", "updates/step", "versions of lag", "s of lag"}
    assert rows["1 collector, updates/step"]["ours"] <= 2 * cluster_check.LIMITS.most, "the learner waits for one collector"


def test_a_record_of_a_launch_is_read():
    def tick(time, state, steps, updates, version, *collectors):
        learner = {"state": state, "steps": steps, "updates": updates, "version": version}
        return json.dumps({"time": time, "learner": learner, "collectors": list(collectors)})

    waiting, first, second = {}, {"state": "collecting", "version": 1}, {"state": "collecting", "version": 3}
    series = cluster_check.read([
        json.dumps({"time": 99.0, "learner": {}, "collectors": [{}, {}]}),
        tick(100.0, "waiting", 0, 0, 1, waiting, waiting),
        tick(101.0, "training", 50, 3, 1, first, waiting),
        tick(103.0, "training", 100, 6, 2, first, second),
    ])  # fmt: skip
    assert list(series.time) == [0.0, 1.0, 3.0]
    assert series.starts == [1.0, 3.0]
    assert list(series.steps) == [0, 50, 100]
    assert list(series.lag_versions) == [0.0, 0.0, 1.0]  # version 3 is out, and one of two collectors still acts with the first
    assert list(series.lag_seconds) == [0.0, 1.0, 1.5]


def test_constants_belong_to_cluster(capsys):
    with pytest.raises(SystemExit):
        main(["replay", "--constants"])
    assert "--constants is an option of cluster, not of replay" in capsys.readouterr().err


def test_a_launch_of_ones_own_is_simulated(capsys):
    cluster_sizes.main(["--collectors", "3", "--update", "0.2", "--limits", "0.01:0.05"])
    said = capsys.readouterr().out
    assert "closed form" in said
    assert "learner waits" in said
    assert "| 3 |" in said


def test_big_stores_are_opened_and_drawn_from(tmp_path):
    rows = smoke(tmp_path, "replay_size")
    for what in (
        "first seen",
        "known",
        "memory",
        "a look",
        "a batch, uniform, cold",
        "a batch, priority",
        "first batch, length",
    ):
        assert sum(what in row["case"] for row in rows) == 2, what
    assert {row["details"]["files"] for row in rows} == {10.0, 20.0}


def test_files_beyond_those_that_are_written_are_links(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_size, "WRITTEN", 3_000)
    assert replay_size.fill(tmp_path / "buffer", 8_000) == 8
    paths = list((tmp_path / "buffer" / "fifo").iterdir())
    assert len({path.stat().st_ino for path in paths}) == 3
    store = TrajectoryStore(tmp_path / "buffer")
    store.refresh()
    assert store.lengths.sum() == 8_000
    store.close()


def test_a_store_smaller_than_the_smallest_is_refused():
    with pytest.raises(ValueError, match="transitions"):
        main(["replay_size", "--transitions", "1000"])
