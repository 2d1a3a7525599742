"""One command for a learner and its collectors, in real processes."""

import json
import signal
import time

import pytest
from launching import alive, family, interrupt

from amago.run.plots import read_metrics

FOREVER = 100_000


@pytest.mark.timeout(600)
def test_a_run_with_two_collectors_is_one_run(launch, tmp_path):
    run = launch(
        "--updates-per-step", "0.005:0.05", collectors=2, epochs=6, train_batches_per_epoch=5, val_interval=2, ckpt_interval=1
    )
    assert run.wait() == 0, run.output
    updates, steps = next(line for line in run.output.splitlines() if line.startswith("learned")).split()[1:]
    assert int(updates) == 30
    assert int(steps) * 0.05 >= 30
    rollouts, evaluations, buffer = run.rows("rollout"), run.rows("val"), run.rows("buffer")
    assert sum(row["values"]["Number of Rollouts"] for row in rollouts) * 6 >= int(steps) - 200, (
        "all collectors' rollouts are logged"
    )
    assert max(row["values"]["Collectors"] for row in rollouts) == 2
    assert rollouts[-1]["env_steps"] > 0
    assert all(row["grad_steps"] % 5 == 0 for row in evaluations), "weights are published at the end of epochs of five updates"
    assert len({row["grad_steps"] for row in evaluations}) == len(evaluations), "each of other weights, at their place"
    assert (run.run_dir / "ckpts" / "best" / "policy.pt").is_file(), "the learner's callbacks hear of evaluations"
    for rows in (rollouts, evaluations, buffer, run.rows("train")):
        for axis in ("env_steps", "grad_steps", "epoch"):
            values = [row[axis] for row in rows]
            assert values == sorted(values), axis
    ratios = [row["values"]["Updates per Environment Step"] for row in buffer if row["env_steps"]]
    assert 0 < max(ratios) <= 0.05
    assert {"Learner Waited (s)", "Collectors Paused (s)"} <= buffer[-1]["values"].keys()
    for i in (0, 1):
        own = read_metrics(run.run_dir / "launch" / f"collector-{i}")
        assert {row["section"] for row in own} >= {"rollout"}
    sections = {row["section"] for row in read_metrics(run.run_dir / "launch" / "collector-1")}
    assert "val" not in sections, "collector 0 alone evaluates"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_with_a_complete_state_and_the_same_command_resumes(launch, number):
    run = launch(collectors=1, epochs=FOREVER, train_batches_per_epoch=2, ckpt_interval=FOREVER, resume="auto")
    run.until(lambda: len(run.rows("train")) > 2)
    everyone = family(run.process.pid)
    assert len(everyone) >= 2
    began = time.monotonic()
    interrupt(run) if number == signal.SIGINT else run.process.send_signal(number)
    assert run.wait() == 128 + number, run.output
    assert time.monotonic() - began < 30
    assert not alive(everyone)
    done = max(row["grad_steps"] for row in run.rows("train"))
    again = launch(collectors=1, epochs=FOREVER, train_batches_per_epoch=2, ckpt_interval=FOREVER, resume="auto")
    again.until(lambda: max(row["grad_steps"] for row in again.rows("train")) > done)
    again.process.send_signal(signal.SIGTERM)
    again.wait()
    steps = [row["env_steps"] for row in again.rows("buffer")]
    assert steps == sorted(steps), "the count of environment steps goes on"


@pytest.mark.timeout(600)
def test_collectors_pause_while_the_learner_is_behind_until_it_has_caught_up(launch):
    run = launch("--updates-per-step", "0.2:0.3", collectors=1, epochs=FOREVER, train_batches_per_epoch=20)

    def caught_up():
        rows = [row["values"] for row in run.rows("buffer")]
        paused = [v["Collectors Paused (s)"] > 0 for v in rows]  # however short: a fast learner is behind for a moment only
        return any(p and v.get("Updates per Environment Step", 0) >= 0.2 for p, v in zip(paused, rows, strict=True))

    run.until(caught_up)
    assert run.children.keys() == {"learner", "collector-0"}, "nobody was replaced for pausing"
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert "replaced" not in run.output
    assert all(row["values"].get("Updates per Environment Step", 0) <= 0.3 for row in run.rows("buffer"))


@pytest.mark.timeout(600)
def test_a_mistake_in_the_script_ends_the_launch_with_its_message(launch, tmp_path):
    run = launch(collectors=1, batch_size=0)
    assert run.wait() == 1
    assert "batch_size must be a whole number of at least 1" in run.output


@pytest.mark.timeout(600)
def test_a_collector_that_never_starts_ends_the_launch_with_its_log(launch, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(
        "import json, os, sys, time\n"
        "if json.loads(os.environ['AMAGO_ROLE'])['kind'] == 'collector':\n"
        "    raise SystemExit('no display is there')\n"
        "time.sleep(1000)\n"
    )
    run = launch(collectors=1, program=program)
    assert run.wait() == 1
    assert "no display is there" in run.output
    assert "5 times in a row" in run.output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", ["crash", "hold"])
def test_a_collector_that_dies_or_hangs_is_replaced(launch, order):
    run = launch("--hang-timeout", "8", collectors=2, epochs=FOREVER, train_batches_per_epoch=2)
    run.until(lambda: len(run.children) == 3 and len(run.rows("rollout")) > 1)
    before = run.children
    (run.root / order).touch()
    run.until(lambda: not (run.root / order).exists())
    run.until(lambda: len(run.children) == 3 and run.children != before)
    after = run.children
    assert after["learner"] == before["learner"]
    assert len(set(after.values()) & set(before.values())) == 2, "the other collector goes on"
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert "it is replaced" in run.output
    assert ("exit code -9" if order == "crash" else "has said nothing for 8 seconds") in run.output


def test_two_collectors_and_their_successors_draw_different_random_numbers(launch, tmp_path):
    from amago.run.roles.collector import Collector
    from amago.run.roles.protocol import HELLO, Assignment

    keys = set()
    for index in (0, 1, 0, 1):
        assignment = Assignment("collector", index, 2, str(tmp_path))
        role = Collector(assignment)
        (tmp_path / HELLO).write_text("{}")
        role._begin(tmp_path)
        keys.add(role.seed_key)
    assert len(keys) == 4


def test_an_assignment_survives_the_environment(monkeypatch):
    from amago.run.roles.protocol import VARIABLE, Assignment

    given = Assignment("collector", 3, 8, "/tmp/x", 0.5, None)
    monkeypatch.setenv(VARIABLE, given.variables()[VARIABLE])
    assert Assignment.of_this_process() == given
    assert json.loads(given.variables()[VARIABLE])["index"] == 3
