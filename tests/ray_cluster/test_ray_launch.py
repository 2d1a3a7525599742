"""One command for a learner and collectors on several nodes, each with a directory of its own, in real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest
import tiny

FOREVER = 100_000
SMALL = {"train_batches_per_epoch": 5}


def test_a_run_on_two_nodes_is_one_run(cluster):
    cluster.add("a")
    run = cluster.launch("--updates-per-step", "0.005:0.02", collectors=3, epochs=10, val_interval=2, ckpt_interval=1, **SMALL)
    assert run.wait() == 0, run.output
    updates, steps = next(line for line in run.output.splitlines() if line.startswith("learned")).split()[1:]
    assert int(updates) == 50
    rollouts, evaluations = run.rows("rollout"), run.rows("val")
    assert sum(row["values"]["Number of Rollouts"] for row in rollouts) * 6 >= int(steps) - 200, (
        "all collectors' rollouts are logged"
    )
    assert max(row["values"]["Collectors"] for row in rollouts) > 1
    assert len({name.partition("-")[0] for name in run.arrived}) == 3, "writers of trajectories"
    assert evaluations
    for rows in (rollouts, evaluations, run.rows("buffer"), run.rows("train")):
        for axis in ("env_steps", "grad_steps", "epoch"):
            values = [row[axis] for row in rows]
            assert values == sorted(values), axis
    on_head, on_a = cluster.directories("head"), cluster.directories("a")
    assert (len(on_head), len(on_a)) == (1, 2), "the learner's node has one of its two CPUs left for collectors"
    assert sorted([*on_head, *on_a]) == [0, 1, 2]
    run.check_nothing_is_lost_or_twice()
    said = [(path / "log.txt").read_text() for path in (*on_head.values(), *on_a.values())]
    assert not any(str(run.root / "program") in text for text in said), (
        "collectors use what reached their node, not the learner's files"
    )
    assert not cluster.pids("collector")
    assert not cluster.pids("NodeAgent")


def test_nodes_join_and_are_lost_and_their_directory_is_delivered_by_the_next_launch(cluster):
    cluster.add("a")
    settings = {"collectors": 3, "epochs": FOREVER, "ckpt_interval": FOREVER, "resume": "auto", **SMALL}
    run = cluster.launch(**settings)
    run.until(lambda: len(run.collecting()) == 3)
    assert len(cluster.directories("a")) == 2

    cluster.add("b")
    run.until(lambda: cluster.directories("b") and len(run.collecting()) == 3)
    moved = set(cluster.directories("b"))
    assert len(moved) == 1, "of five CPUs, two are those of the new node"
    before = len(run.arrived)
    run.until(lambda: len(run.arrived) > before + 5)

    cluster.remove("a")
    run.until(lambda: len(run.collecting()) == 3 and set(run.collecting()) == {0, 1, 2})
    before = len(run.arrived)
    run.until(lambda: len(run.arrived) > before + 5)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    run.check_nothing_is_lost_or_twice(except_nodes=["a"])
    assert "has joined" in run.output
    assert "is gone; 2 of the collectors start on other nodes" in run.output or "is gone; 1 of the collectors" in run.output

    cluster.add("a")
    left = [p.name for d in cluster.directories("a").values() for p in (d / "spool" / "buffer" / "fifo").glob("*.safetensors")]
    (
        next(iter(cluster.directories("a").values())) / "spool" / "buffer" / "fifo" / "0000000000-000000000000-n1.safetensors"
    ).write_bytes(b"x")
    again = cluster.launch(**settings)
    again.until(lambda: {*left, "0000000000-000000000000-n1.safetensors"} <= set(again.arrived))
    again.process.send_signal(signal.SIGTERM)
    assert again.wait() == 143, again.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_nodes_with_a_complete_state(cluster, number):
    cluster.add("a")
    run = cluster.launch(collectors=2, epochs=FOREVER, ckpt_interval=FOREVER, resume="auto", **SMALL)
    run.until(lambda: len(run.collecting()) == 2 and len(run.rows("train")) > 1)
    collectors, began = run.collector_pids().values(), time.monotonic()
    run.process.send_signal(number)
    assert run.wait() == 128 + number, run.output
    assert time.monotonic() - began < 60
    assert not [pid for pid in collectors if os.path.exists(f"/proc/{pid}")]
    assert list((run.run_dir / "ckpts" / "training_states").iterdir())
    run.check_nothing_is_lost_or_twice()


def test_what_cannot_be_launched_is_said(cluster):
    run = cluster.launch("--node-dir", "/proc/$NO_SUCH_VARIABLE", collectors=1, epochs=FOREVER)
    assert run.wait() == 1
    assert "no node of the cluster can run collectors" in run.output
    assert "NO_SUCH_VARIABLE" in run.output


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1"),
        ("ray://127.0.0.1:1", "on a node of the cluster"),
        ("here", "HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused(tmp_path, address, said):
    program = tmp_path / "train.py"
    program.touch()
    words = [sys.executable, "-m", "amago.cli", "launch", "--collectors", "1", "--ray", address, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=tiny.environment(), check=False)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_the_command_for_any_environment_runs_on_a_cluster(cluster, tmp_path):
    cluster.add("a")
    sizes = "--parallel_actors 2 --timesteps_per_epoch 40 --batches_per_epoch 2 --epochs 2 --batch_size 4 --max_seq_len 8 --env_mode sync"
    options = f"{sizes} --quiet --horizon 20 --updates_per_step=:0.05 --run-name run --collectors 2".split()
    words = ["train", "CartPole-v1", *options]
    where = ["--buffer-dir", str(tmp_path), "--ray", cluster.address, "--node-dir", f"{tmp_path}/nodes/$AMAGO_TEST_NODE"]
    words = [sys.executable, "-m", "amago.cli", *words, *where]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=tiny.environment(), cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert [len(cluster.directories(node)) for node in ("head", "a")] == [1, 1]


def test_a_node_whose_collectors_never_start_is_used_no_more(cluster):
    cluster.add("a")
    run = cluster.launch("--updates-per-step", ":0.05", collectors=2, epochs=FOREVER, broken_on="a", **SMALL)
    run.until(lambda: len(cluster.directories("head")) == 2 and len(run.collecting()) == 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert "can run no collectors" in run.output
    assert "no display is there" in run.output
