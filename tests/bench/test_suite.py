"""The suite of learning tasks: its environments, its statistics, and runs that end with their budget and continue."""

import json
import math
import re
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from amago.run.checkpoint import load_weight_file
from benchmarks.suite import (  # fmt: skip
    board,
    example,
    meta,
    methods,
    offline,
    pole_limits,
    recorded,
    rooms,
    runs,
    shell,
    statistics,
    supervised,
    tmaze,
    tmaze_cost,
    tmaze_lengths,
)
from benchmarks.suite.__main__ import main
from benchmarks.suite.envs import ProofOfMemory
from benchmarks.suite.recorded import Point, Recorder
from benchmarks.suite.runs import Config
from benchmarks.suite.tasks import TASKS

LAKE = TASKS[0]


def test_a_filter_and_a_regulator_balance_the_noisy_poles_by_cartpole_s_physics():
    env = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    for push in (1, 0, 1, 1, 0, 0, 0, 1):
        expected = pole_limits.moved(env.state[None], np.array([2.0 * push - 1.0]))
        env.step(push)
        np.testing.assert_allclose(env.state, expected[0], rtol=1e-12)
    gains = pole_limits.regulator((0.01, 0.0, 10.0, 0.0), 0.1)
    easy, hard = (pole_limits.played(noise, gains, 1e-5, 200, seed=0) for noise in (0.1, 0.3))
    assert hard < 0.5 < 0.95 < easy


def curve(*scores: float) -> list[Point]:
    return [Point(10.0 * i, 100 * i, 5 * i, s) for i, s in enumerate(scores)]


@pytest.mark.parametrize("task", TASKS, ids=[t.name for t in TASKS])
def test_random_actions_score_as_the_task_says(task):
    env = task.make()
    env.action_space.seed(0)
    returns, longest = [], 0
    for seed in range(60):
        env.reset(seed=seed)
        total, steps, over = 0.0, 0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, steps, over = total + float(reward), steps + 1, terminated or truncated
        returns.append(total)
        longest = max(longest, steps)
    error = np.std(returns) / np.sqrt(len(returns))
    assert abs(np.mean(returns) - task.low) < 5 * error + 0.05 * (task.high - task.low)
    assert longest <= task.horizon
    assert task.low < task.threshold < task.high
    assert (task.scaled(task.low), task.scaled(task.high)) == (0, 1)


def test_time_to_threshold_and_the_score_of_the_last_fifth():
    both, luck = (0, 1.2, 0.9), (2,)  # both together reach it; one evaluation may be luck
    expected = {(0, 1, 1): 10.0, both: 10.0, (0, 1, 0, 1, 1): 30.0, (0, 0.9, 1.5, 0): math.inf, luck: math.inf}
    assert {scores: statistics.time_to_threshold(curve(*scores), 1.0) for scores in expected} == expected
    assert statistics.final_score(curve(0, 0, 0, 0, 1, 3)) == 2.0


def test_the_probability_of_improvement_and_its_interval():
    better, worse = {"x": [3, 4, 5], "y": [3, 4, 5]}, {"x": [0, 1, 2], "y": [3, 4, 5], "z": [9]}
    p, low, high = statistics.probability_of_improvement(better, worse)
    assert p == pytest.approx(0.75)
    assert low < p < high
    assert low >= 0.5
    with pytest.raises(ValueError, match="no task in common"):
        statistics.probability_of_improvement({"x": [1]}, {"y": [1]})


@pytest.fixture
def task(monkeypatch):
    tiny = {
        "Experiment.parallel_actors": 2, "Experiment.train_batches_per_epoch": 2, "Experiment.val_interval": 1,
        "Experiment.train_timesteps_per_epoch": 54,
    }  # fmt: skip
    monkeypatch.setattr(runs, "bindings", lambda task, base: (tiny, ["zoo/solve_lake"]))
    return replace(LAKE, rollouts=2)


def test_a_run_ends_with_its_budget_and_is_not_repeated(tmp_path, task):
    runs.train(task, Config("c"), 0, tmp_path, tmp_path / "work", budget=0.0)
    path = runs.result_path(tmp_path, "c", task.name, 0)
    head, *points, last = recorded.rows(path)
    assert (head["task"], head["seed"], head["config"]["base"]) == ("lake3", 0, "tuned")
    assert (len(points), last) == (1, {"done": True})
    before = path.read_bytes()
    runs.train(task, Config("c"), 0, tmp_path, tmp_path / "other", budget=100.0)
    assert path.read_bytes() == before
    assert not (tmp_path / "other").exists()


def test_a_run_may_end_when_the_task_is_solved(tmp_path, task):
    easy = replace(task, threshold=-1.0)
    runs.train(easy, Config("easy"), 0, tmp_path, tmp_path / "work", budget=60.0, until_solved=True)
    head, *points, last = recorded.rows(runs.result_path(tmp_path, "easy", task.name, 0))
    assert (head["goal"], len(points), last) == (-1.0, recorded.IN_A_ROW, {"done": True})
    assert points[-1]["updates"] == 4


@pytest.mark.parametrize("method", methods.METHODS, ids=[m.name for m in methods.METHODS])
def test_every_method_starts(tmp_path, task, method):
    files = (str(method.file),) if method.file else ()
    runs.train(task, Config(method.name, "tuned", files, method.traj_encoder), 0, tmp_path, tmp_path / "work", budget=0.0)
    head, *_, done = recorded.rows(runs.result_path(tmp_path, method.name, task.name, 0))
    assert done == {"done": True}
    assert head["config"]["files"] == [f"benchmarks/suite/method_files/{method.name}.gin"] * len(files), "of no machine alone"
    assert method.what


def test_an_interrupted_run_continues_with_the_time_it_has_spent(tmp_path, task, monkeypatch):
    class Killed(Exception):
        pass

    ended = Recorder.on_log

    def log(self, experiment, row):
        ended(self, experiment, row)
        if row.section == "val" and experiment.epoch == 3:
            raise Killed

    path = runs.result_path(tmp_path, "c", task.name, 1)
    monkeypatch.setattr(Recorder, "on_log", log)
    built = runs.build
    monkeypatch.setattr(runs, "build", lambda *a: _every_epoch(built(*a)))
    with pytest.raises(Killed):
        runs.train(task, Config("c"), 1, tmp_path, tmp_path / "work", budget=1e9)
    assert not recorded.is_done(path)
    path.write_text(path.read_text() + '{"cpu": 1')  # killed while writing
    before = [r for r in recorded.rows(path) if "score" in r]
    monkeypatch.setattr(Recorder, "on_log", ended)
    runs.train(task, Config("c"), 1, tmp_path, tmp_path / "work", budget=0.0)
    after = [r for r in recorded.rows(path) if "score" in r]
    assert recorded.is_done(path)
    assert len(after) >= 2
    kept = [r for r in before if r["updates"] <= after[-2]["updates"]]
    assert after[: len(kept)] == kept
    assert all(x["cpu"] <= y["cpu"] for x, y in zip(after, after[1:]))
    assert after[-1]["updates"] >= kept[-1]["updates"] > 0


def _every_epoch(run):
    run.ckpt_interval = 1
    return run


def test_the_command_trains_compares_and_draws(tmp_path, capsys):
    results = tmp_path / "r"
    for name, shift in (("a", 0.0), ("b", 1.0)):
        for seed in range(2):
            path = runs.result_path(results, name, "lake3", seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            points = [{"cpu": 10 * i, "steps": i, "updates": i, "score": 1.0 * i + shift} for i in range(6)]
            path.write_text("".join(json.dumps(r) + "\n" for r in [{"task": "lake3"}, *points, {"done": True}]))
    unfinished = runs.result_path(results, "a", "lake3", 2)
    unfinished.write_text('{"task": "lake3"}\n{"cpu": 1, "steps": 1, "updates": 1, "score": 99.0}\n')
    picture = tmp_path / "p.png"
    assert main(["table", "--config", "b", "--against", "a", "--results", str(results), "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "P(b beats a) by final score: 1.00" in out
    assert "40 s (2 of 2)" in out  # b reaches 5.0 at 40 s and stays
    assert "> 50 s (0 of 2)" in out
    assert "99" not in out
    assert picture.stat().st_size > 5_000
    with pytest.raises(SystemExit):
        main(["run", "--config", "a", "--tasks", "lake4"])
    runs.result_path(results, "a", "lake3", 1).unlink()
    assert main(["table", "--config", "b", "--against", "a", "--results", str(results)]) == 0
    assert "No task with two seeds of both: too few for a probability" in capsys.readouterr().out


def trained(of, results, *words):
    """Train an entry of a board, for which two judged rollouts are enough."""
    assert board.main(of, ["one", "--results", str(results), *words]) == 0


def shown(of, results, capsys, *words):
    """The rows of a board's table."""
    capsys.readouterr()
    assert board.main(of, ["table", "--results", str(results), *words]) == 0
    return capsys.readouterr().out.splitlines()[2:]


def judged_by_two(of):
    return replace(of, entries=[replace(entry, judged=2) for entry in of.entries])


def test_what_amago_train_reaches_is_recorded_and_drawn(tmp_path, capsys):
    trained(shell.BOARD, tmp_path, "--tasks", "CartPole-v1", "--seeds", "3", "--budget", "0")
    found = recorded.rows(tmp_path / "CartPole-v1" / "seed3.jsonl")
    assert (found[0]["task"], found[-1]) == ("CartPole-v1", {"done": True})
    assert [r["steps"] for r in found if "score" in r] == [0]
    assert "CartPole-v1 | 475 | not in" in shown(shell.BOARD, tmp_path, capsys, "--picture", str(tmp_path / "curves.png"))[0]
    assert (tmp_path / "curves.png").stat().st_size > 5000


@pytest.mark.parametrize("right", [True, False])
def test_the_proof_of_memory_pays_at_the_goal_that_it_showed(right):
    env = ProofOfMemory()
    for seed in range(10):
        (left, position, shown), _ = env.reset(seed=seed)
        way = int((shown > 0) == right)
        rewards, over = [], False
        while not over:
            (seen_left, _, seen_right), reward, over, _, info = env.step(way)
            rewards.append(reward)
            assert (seen_left, seen_right) == ((left, shown) if len(rewards) < 2 else (0, 0))
        assert rewards == [-0.025] * (2 + round(4 - position * (2 * way - 1) * 5)) + [1.0 if right else -1.0]
        assert list(info.values()) == [float(right)]


def test_a_task_of_what_is_seen_once_is_trained_and_shown(tmp_path, capsys):
    trained(rooms.BOARD, tmp_path, "--tasks", "ProofOfMemory", "--seeds", "0", "--budget", "0")
    (row,) = shown(rooms.BOARD, tmp_path, capsys)
    assert re.fullmatch(r"\| ProofOfMemory \| [01]\.\d\d \| \S+ \| \S+ \| not reached \| \d+ \|", row)


def test_a_corridor_is_trained_and_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tmaze, "BOARD", judged_by_two(tmaze.BOARD))
    judge, judged = example.judge, []

    def noted(run, rollouts):
        kept, now = load_weight_file(run.ckpt_dir / "best" / "policy.pt").weights, run.policy.state_dict()
        judged.append(all(torch.equal(now[name], weight) for name, weight in kept.items()))
        return judge(run, rollouts)

    monkeypatch.setattr(example, "judge", noted)
    results = tmp_path / "r"
    words = "--memory_size 8 --parallel_actors 2 --grads_per_epoch 2 --epochs 1 --batch_size 2 --timesteps_per_epoch 310"
    trained(tmaze.BOARD, results, "--tasks", "300_gru", f"--more={words}")
    found = recorded.rows(results / "300_gru" / "seed1.jsonl")
    assert (found[0]["task"], found[-1], found[-2]["steps"]) == ("300_gru", {"done": True}, 620)
    assert found[-2]["best"].keys() == {"greedy", "sampled"}
    assert judged == [False, True], "the last weights, then those of the best evaluation, which was before training"
    assert not (tmp_path / "work" / "r" / "300_gru_1").exists()
    assert "| 300, gru | " in shown(tmaze.BOARD, results, capsys)[0]


def test_corridors_of_all_lengths_are_trained_and_go_on_with_the_weights_of_shorter_ones(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tmaze_lengths, "BOARD", judged_by_two(tmaze_lengths.BOARD))
    words = "--horizon 12 --shortest 4 --timesteps_per_epoch 12 --memory_size 8 --parallel_actors 3 --grads_per_epoch 2"
    for task, budget in (("1000", "1e9"), ("3000", "0")):
        given = ("--tasks", task, "--seeds", "0", "--budget", budget, f"--more={words} --batch_size 2 --epochs 1")
        trained(tmaze_lengths.BOARD, tmp_path / "r", *given)
    first, second = (load_weight_file(tmp_path / "work" / "r" / f"{h}_0.pt").weights for h in (1000, 3000))
    assert all(torch.equal(second[name], weight) for name, weight in first.items()), "without an update"
    rows = shown(tmaze_lengths.BOARD, tmp_path / "r", capsys)
    assert [row.split(" | ")[0] for row in rows] == ["| 10 to 1,000", "| 10 to 3,000"]


def test_methods_learn_from_a_record_and_are_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(offline, "BOARD", judged_by_two(offline.BOARD))
    words = f"--dataset {tmp_path / 'p.hdf5'} --record 600 --grads_per_epoch 2 --epochs 1 --parallel_actors 2 --batch_size 2"
    for method in offline.METHODS:
        trained(offline.BOARD, tmp_path / "r", "--tasks", f"pendulum_{method}", "--seeds", "0", f"--more={words}")
    row = shown(offline.BOARD, tmp_path / "r", capsys)[-1]
    assert row.startswith("| Pendulum-v1, all of training (Minari) | -")
    assert row.count(" | -") == len(offline.METHODS) == len(list(offline.SETTINGS.glob("*.gin")))


def test_a_task_of_new_worlds_is_trained_and_shown(tmp_path, capsys, monkeypatch):
    lakes = [replace(entry, judged=2) for entry in meta.ENTRIES[:2]]
    assert [lake.name for lake in lakes] == ["lake5", "lake5 without memory"]
    monkeypatch.setattr(meta, "BOARD", replace(meta.BOARD, entries=lakes))
    words = "--lake_size 3 --k_episodes 2 --memory_size 8 --parallel_actors 2 --batches_per_epoch 2 --epochs 1 --timesteps_per_epoch 20"
    trained(meta.BOARD, tmp_path, "--seeds", "0", f"--more={words} --batch_size 2")
    rows = shown(meta.BOARD, tmp_path, capsys)
    assert [row.split(" | ")[0] for row in rows] == ["| lake5", "| lake5 without memory"]
    assert all(re.search(r"\| success [01]\.\d\d in attempt 1; [01]\.\d\d in attempt 2 \|", row) for row in rows)
    assert "| 2, 0.00M |" in rows[0]


@pytest.mark.parametrize("model", ["gru", "transformer_rope"])
def test_models_learn_speeds_from_labels(model):
    found = supervised.learn("velocity", model, 8, updates=70, rate=2e-3, seed=0)
    assert list(found) == [60, 70]
    assert found[70] < 0.7  # a guess has 1


def test_the_sign_of_the_first_step_is_learned_from_labels(capsys):
    words = "--models gru --length 6 --updates 130 --rate 3e-3 --seeds 1"
    assert supervised.main(["sign", *words.split()]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert (head, row[:8]) == ("| model | 60 | 125 | 130 |", "| gru | ")
    assert float(row.split(" | ")[-1].strip(" |")) > 0.9


def test_the_cost_of_a_t_maze_is_measured(capsys):
    assert tmaze_cost.main(["--lengths", "8", "--models", "gru"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert (head, row.startswith("| 8 | ")) == ("| steps | gru: update, ms | a step, ms |", True)
    assert all(float(cell) > 0 for cell in row.strip("| ").split(" | "))
