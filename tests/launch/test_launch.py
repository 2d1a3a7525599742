"""One command for a learner and its collectors, in real processes."""

import os
import signal

import tiny
from fault_helpers import assert_gone
from launching import FOREVER, RUN, family, stop

from amago.run.checkpoint import load_weight_file
from amago.run.plots import read_metrics


def test_a_run_with_two_collectors_is_one_run(launch, tmp_path):
    fields = {"train_batches_per_epoch": 5, "val_interval": 2, "ckpt_interval": 1}
    run = launch("--updates-per-step", "0.005:0.05", collectors=2, **RUN | fields)
    run.until(lambda: any(row["values"].get("Collectors") == 2 for row in run.rows("rollout")) and len(run.rows("val")) > 1)
    stop(run)
    rollouts, evaluations, buffer = run.rows("rollout"), run.rows("val"), run.rows("buffer")
    assert run.rollouts == run.arrived[0], "all collectors' rollouts are logged, and in the store"
    assert rollouts[-1]["env_steps"] > 0
    assert all(row["grad_steps"] % 5 == 0 for row in evaluations), "weights are published at the end of epochs of five updates"
    assert len({row["grad_steps"] for row in evaluations}) == len(evaluations), "each of other weights, at their place"
    assert (run.run_dir / "ckpts" / "best" / "policy.pt").is_file(), "the learner's callbacks hear of evaluations"
    for rows in (rollouts, evaluations, buffer, run.rows("train")):
        for axis in ("env_steps", "grad_steps", "epoch"):
            values = [row[axis] for row in rows]
            assert values == sorted(values), axis
    buffer = [row for row in buffer if "Updates per Environment Step" in row["values"]]
    ratios = [row["values"]["Updates per Environment Step"] for row in buffer]
    assert 0 < max(ratios) <= 0.05
    assert {"Learner Waited (s)", "Collectors Paused (s)"} <= buffer[-1]["values"].keys()
    for i in (0, 1):
        own = read_metrics(run.run_dir / "launch" / f"collector-{i}")
        assert {row["section"] for row in own} >= {"rollout"}
    sections = {row["section"] for row in read_metrics(run.run_dir / "launch" / "collector-1")}
    assert "val" not in sections, "collector 0 alone evaluates"


def test_the_rollouts_of_an_evaluation_that_a_signal_ends_are_not_logged_as_collected(launch, tmp_path):
    run = launch(collectors=1, epochs=FOREVER, train_batches_per_epoch=2, val_interval=1)
    run.until(lambda: run.arrived[0])
    (tmp_path / "hold-evaluation").touch()
    run.until((tmp_path / "holds-evaluation").exists)
    os.kill(run.children["collector-0"], signal.SIGTERM)  # as the launch does, which might be too late
    run.process.send_signal(signal.SIGTERM)
    (tmp_path / "hold-evaluation").unlink()
    assert run.wait() == 128 + signal.SIGTERM, run.output
    assert run.rollouts == run.arrived[0]


def test_a_second_launch_of_a_name_is_refused_and_ctrl_c_ends_all_with_a_complete_state_and_the_same_command_resumes(launch):
    run = launch(collectors=1, **RUN)
    run.until(lambda: len(run.rows("train")) > 2)
    second = launch(collectors=1)
    assert second.wait() == 1
    assert "RunInUseError: run 'run'" in second.output
    assert "Traceback" not in second.output
    everyone = family(run.process.pid)
    assert len(everyone) >= 2
    stop(run, signal.SIGINT)
    assert_gone(everyone)
    done = max(row["grad_steps"] for row in run.rows("train"))
    again = launch(collectors=1, **RUN)
    again.until(lambda: max(row["grad_steps"] for row in again.rows("train")) > done)
    stop(again)
    steps = [row["env_steps"] for row in again.rows("buffer")]
    assert steps == sorted(steps), "the count of environment steps goes on"


def test_by_default_each_side_waits_at_half_and_at_twice_the_script_s_own_ratio(launch, tmp_path):
    (tmp_path / "update-slowly").touch()  # an update a second: any collector makes more than 5 steps in that time
    own = {"train_batches_per_epoch": 8, "train_timesteps_per_epoch": 10}  # 8 updates for 20 steps of two actors
    run = launch(collectors=1, epochs=FOREVER, **own)

    def values(name):
        return [row["values"][name] for row in run.rows("buffer") if name in row["values"]]

    run.until(lambda: run.beat("collector-0").get("paused") == "paused" and run.beat("learner").get("pause"))
    assert run.beat("learner")["updates"] <= 0.2 * run.beat("learner")["steps"] + 1
    (tmp_path / "hold-phase").touch()  # no more steps: the learner goes on until it has twice the ratio
    (tmp_path / "update-slowly").unlink()

    def waits():
        beat = run.beat("learner")
        return beat.get("state") == "waiting" and beat["updates"] > 0.8 * beat["steps"] - 1

    run.until(waits)
    (tmp_path / "hold-phase").unlink()
    run.until(lambda: max(values("Learner Waited (s)")) > 0 and max(values("Updates per Environment Step")) > 0.4)
    assert run.children.keys() == {"learner", "collector-0"}, "nobody was replaced for pausing"
    stop(run)
    assert "replaced" not in run.output
    assert max(values("Collectors Paused (s)")) > 0
    assert max(values("Updates per Environment Step")) <= 0.8


def test_a_mistake_in_the_script_ends_the_launch_with_its_message(launch, tmp_path):
    run = launch(collectors=1, batch_size=0)
    assert run.wait() == 1
    assert "batch_size must be a whole number of at least 1" in run.output


def test_epsilon_of_collectors_falls_within_the_run(launch):
    """A collector's epochs do not end, so it takes the length of the run from the program's settings."""
    run = launch("--updates-per-step", ":1", collectors=1, epochs=6, train_timesteps_per_epoch=24, train_batches_per_epoch=50)
    assert run.wait() == 0, run.output
    planned = 6 * 2 * 24  # steps; there are 300 at least, since so many updates are made
    rows = tiny.rows(run.run_dir / "launch" / "collector-0", "rollout")
    late = [r["values"]["Epsilon"] for r in rows if r["env_steps"] >= 0.75 * planned]
    assert late
    assert max(late) < 0.3, "it falls to .05 in the first half of the run; a million steps would leave it at 1"


def test_a_collector_goes_on_in_the_exploration_schedule_of_the_one_that_it_replaces(launch, tmp_path):
    (tmp_path / "update-slowly").touch()
    run = launch("--updates-per-step", ":", collectors=1, epochs=1000, train_timesteps_per_epoch=24, train_batches_per_epoch=1)
    known, directory = 1200, run.run_dir / "launch" / "collector-0"  # steps of an actor, of the 12,000 in which epsilon falls

    def published():
        note = load_weight_file(run.run_dir / "ckpts" / "latest" / "policy.pt").note if run.phases() else {"explored": {}}
        return max(note["explored"].values(), default=0)

    run.until(lambda: published() >= known)
    rows, before = tiny.rows(directory, "rollout"), run.children["collector-0"]
    os.kill(before, signal.SIGKILL)
    run.until(
        lambda: run.children.get("collector-0") not in (None, before) and len(tiny.rows(directory, "rollout")) > len(rows) + 3
    )
    largest = max(row["values"]["Epsilon"] for row in rows if row["env_steps"] >= 2 * known)
    assert largest < 0.95
    assert all(row["values"]["Epsilon"] <= largest for row in tiny.rows(directory, "rollout")[len(rows) :])
    stop(run)
