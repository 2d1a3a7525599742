"""Evaluations: the rollouts that count, their metrics and intervals, and how a run, a command and a card show them."""

import copy
import json
import pickle
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from counting_env import make_counting
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EPISODE, started

from amago import config
from amago.cli import main
from amago.envs import AMAGOEnv, EpisodeRecord, ReturnHistory, SpecialMetricHistory, make_pool
from amago.envs.builtin import MetaFrozenLake
from amago.policy.card import Results
from amago.run.evaluate import (
    AVERAGE_RETURN,
    AVERAGE_RETURN_OF_ROLLOUTS,
    NUMBER_OF_ROLLOUTS,
    evaluate,
    merge_returns,
    merge_specials,
    summarise,
)
from amago.run.results import Estimate, Evaluation
from amago.run.rollout import Rollout, shares


def episodes():
    return [
        EpisodeRecord("b", 1.0, 5, {"Success": 1.0}),
        EpisodeRecord("a", 3.0, 5, {"Success": 0.0, "Steps": 7.0}),
        EpisodeRecord("b", 5.0, 5, {"Success": 0.0}),
    ]


def test_a_summary():
    returns, specials = merge_returns([ReturnHistory.of(episodes())]), merge_specials([SpecialMetricHistory.of(episodes())])
    assert summarise(returns, specials) == {
        AVERAGE_RETURN: 3.0, AVERAGE_RETURN_OF_ROLLOUTS: 3.0, "Number of Rollouts": 3.0,
        "Average Total Return in a": 3.0, "Average Total Return in b": 3.0,
        "Bottom Quintile Total Return in a": 3.0, "Bottom Quintile Total Return in b": pytest.approx(1.8),
        "Mean of Bottom Quintile Total Return in a": 3.0, "Mean of Bottom Quintile Total Return in b": 1.0,
        "Average Success in a": 0.0, "Average Success in b": 0.5, "Average Steps in a": 7.0,
    }  # fmt: skip


def test_the_mean_over_environment_names_does_not_favour_short_rollouts():
    metrics = summarise({"long": [10.0], "short": [0.0, 0.0, 0.0]}, {})
    assert (metrics[AVERAGE_RETURN], metrics[AVERAGE_RETURN_OF_ROLLOUTS]) == (5.0, 2.5)
    metrics = summarise({"a": [float(n) for n in range(10, -1, -1)]}, {})
    assert metrics["Mean of Bottom Quintile Total Return in a"] == 0.5


def run(agent, **kwargs):
    with closing(make_pool([tiny.tmaze] * 3, env_mode="sync", seed=4)) as pool:
        return evaluate(agent, pool, **({"timesteps": 3 * EPISODE} | kwargs))


def test_evaluate_needs_no_experiment(tmp_path):
    e = started(tmp_path)
    agent = e.policy
    agent.train()
    metrics = run(agent)
    assert metrics["Number of Rollouts"] == 9
    assert -1.0 <= metrics[AVERAGE_RETURN] <= 1.0
    assert agent.training, "its mode is put back"
    assert run(agent, timesteps=100 * EPISODE, episodes=5)["Number of Rollouts"] == 5
    assert run(agent, timesteps=EPISODE - 1) == {}


def test_a_seed_repeats_an_evaluation_and_a_greedy_policy_ignores_it(tmp_path):
    agent = started(tmp_path, traj="transformer").policy
    assert run(agent, seed=1) == run(agent, seed=1)
    assert len({run(agent, seed=s, timesteps=10 * EPISODE)[AVERAGE_RETURN] for s in range(5)}) > 1
    assert run(agent, seed=1, sample=False) == run(agent, seed=2, sample=False)


RETURNS = {"a": [1.0, 2.0, 6.0], "b": [0.5]}
SPECIALS = {"Attempt 0 Success in a": [0.0, 1.0, 0.0], "Attempt 1 Success in a": [1.0, 1.0, float("nan")], "Speed in b": [3.0]}


def lake():
    return AMAGOEnv(MetaFrozenLake(size=2, k_episodes=3, max_episode_steps=3), env_name="Lake")


def test_metrics_by_name_are_a_dict_and_the_figures_are_beside_them():
    found = summarise(RETURNS, SPECIALS)
    assert found["Average Total Return (Across All Env Names)"] == pytest.approx((3.0 + 0.5) / 2)
    assert isinstance(found, dict), "as programs expect"
    assert found.returns == RETURNS
    assert found.scores["a"] == Estimate.of(RETURNS["a"])
    assert list(found.attempts) == ["Attempt # Success in a"]
    assert [(i, e.mean, e.rollouts) for i, e in found.attempts["Attempt # Success in a"].items()] == [
        (1, pytest.approx(1 / 3), 3),
        (2, 1.0, 2),
    ]
    for same in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (str(same), repr(same), same.returns) == (str(found), repr(found), found.returns)
    empty = summarise({}, {})
    assert (dict(empty), str(empty).splitlines()[0].split()[0]) == ({}, "return")


def test_all_of_it_is_json_and_that_of_a_card():
    found = json.loads(json.dumps(summarise(RETURNS, SPECIALS).as_json(), allow_nan=False))
    assert found["returns"]["a"] == {
        "mean": 3.0, "interval_95": [1.0, 6.0], "std": pytest.approx(np.std(RETURNS["a"])), "rollouts": 3, "of_each": [1.0, 2.0, 6.0],
    }  # fmt: skip
    assert found["attempts"]["Attempt # Success in a"]["2"]["mean"] == 1.0
    card = Results(RETURNS, SPECIALS, seed=3).as_json()
    assert {k: card[k] for k in found} == found
    assert card["seed"] == 3


def test_tables_have_a_line_for_each_attempt():
    text, page = (show(Evaluation({}, RETURNS, SPECIALS)) for show in (str, Evaluation._repr_html_))
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "0.333", "[0,", "1]"] in rows
    assert ["2", "1", "[1,", "1]"] in rows
    assert "<td>0.333 [0, 1]</td>" in page
    assert "<script>" not in Evaluation({}, {"<script>": [1.0]}, {})._repr_html_()


def test_a_test_of_a_run_and_the_command_say_them(tmp_path, capsys):
    e = tiny.learned(tmp_path, lake, always_save_latest=True)
    (e.run_dir / "settings.yaml").write_text("env: amago.envs.builtin:MetaFrozenLake\n")
    found = e.evaluate_test(lake, timesteps=60, episodes=6)
    assert len(found.returns["Lake"]) == 6
    assert found["Average Total Return in Lake"] == pytest.approx(np.mean(found.returns["Lake"]))
    assert list(found.attempts["Attempt # Success in Lake"]) == [1, 2, 3]
    assert found["Average Rollout Length"] > 0
    run, env = str(e.run_dir), f"{__name__}:lake"
    e.close()
    capsys.readouterr()
    argv = ["eval", run, "--env", env, "--episodes", "3", "--actors", "2", "--seed", "1"]
    assert main([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["returns"]["Lake"]["rollouts"] == len(printed["returns"]["Lake"]["of_each"]) == 3
    assert printed["all"]["Number of Rollouts"] == 3
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "Attempt 0" not in out, "attempts are counted from 1, in the table"
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["1", "2", "3"]
    assert main([*argv, "--json", "--memory"]) == 2


FOR_EVER = 1 << 40


class Numbered(gym.Env):
    """Rollouts of given lengths, over and over; the last reward of the n-th one is n."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lengths):
        self.lengths, self.n = lengths, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n, self.t = self.n + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        done = self.t == self.lengths[self.n % len(self.lengths)]
        return np.zeros(1, np.float32), float(self.n * done), done, False, {}


class GoodIsLong(Numbered):
    """A coin decides: 10 steps and a return of 0, or 100 steps and a return of 1."""

    def __init__(self):
        super().__init__([10])

    def reset(self, *, seed=None, options=None):
        out = super().reset(seed=seed)
        self.n = int(self.np_random.integers(2))
        self.lengths = [100 if self.n else 10]
        return out


class Idle(torch.nn.Module):
    """An agent that does nothing and has no memory."""

    def init_hidden_state(self, batch_size, device):
        return ()

    def reset_hidden_state(self, memory, resets):
        return memory

    def can_slice_hidden_state(self, memory):
        return False

    def get_actions(self, obs, rl2s, time_idxs, memory, sample):
        return torch.zeros(len(rl2s), 1, dtype=torch.int64), memory


def numbered(lengths):
    return AMAGOEnv(Numbered(lengths), env_name="Numbered")


def pool_of(lengths):
    return make_pool([partial(numbered, each) for each in lengths], "sync", parallel_actors=len(lengths))


def counted(pool, episodes, timesteps=FOR_EVER):
    """Steps of each actor, and {actor: returns of the rollouts that count}."""
    with closing(pool):
        rollout = Rollout(pool)
        rollout.reset()
        taken, stats = rollout.run_phase(Idle(), timesteps, episodes=episodes)
    out = {actor: [] for actor in range(pool.num_actors)}
    for episode in stats.episodes:
        out[episode.actor].append(int(episode.ret))
    return taken, out


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=5),
    episodes=st.integers(0, 20),
    timesteps=st.just(FOR_EVER) | st.integers(1, 40),
)
def test_exactly_as_many_rollouts_count_as_asked_the_first_of_each_actor(lengths, episodes, timesteps):
    taken, by_actor = counted(pool_of(lengths), episodes, timesteps)
    wanted = shares(episodes, len(lengths))
    ends = [np.cumsum([own[k % len(own)] for k in range(n)]) for own, n in zip(lengths, wanted)]
    assert by_actor == {actor: list(range(int((own <= timesteps).sum()))) for actor, own in enumerate(ends)}
    needed = max(int(own[-1]) if len(own) else 0 for own in ends)
    assert min(needed, timesteps) <= taken <= min(needed + 1, timesteps), "an end is known one step later"


class Tallied(Numbered):
    """Appends a letter to a file for each step."""

    def __init__(self, lengths, path):
        super().__init__(lengths)
        self.path = path

    def step(self, action):
        with open(self.path, "a") as file:
            file.write("x")
        return super().step(action)


@pytest.mark.parametrize(
    "mode", [{"env_mode": "sync"}, {"env_mode": "async", "workers": 1}, {"env_mode": "async", "workers": 2}]
)
def test_no_step_is_taken_beyond_what_was_asked_and_actors_go_on_afterwards(tmp_path, mode):
    lengths = [[1, 5], [9], [2, 2, 7], [3], [30]]
    makers = [partial(AMAGOEnv, Tallied(own, str(tmp_path / str(i))), "E") for i, own in enumerate(lengths)]
    with closing(make_pool(makers, parallel_actors=5, **mode)) as pool:
        rollout = Rollout(pool)
        rollout.reset()
        _, stats = rollout.run_phase(Idle(), FOR_EVER, episodes=7)
        assert len(stats.episodes) == 7
        taken = [(tmp_path / str(i)).stat().st_size for i in range(5)]
        assert taken == [1 + 5, 9 + 9, 2, 3, 30]
        assert not pool.idle.any()
        rollout.run_phase(Idle(), 4)
        assert [(tmp_path / str(i)).stat().st_size for i in range(5)] == [n + 4 for n in taken]
        assert (pool.time_idxs[:, 0] == [3, 4, 2, 1, 4]).all()


def test_rows_of_a_vectorised_environment_are_actors():
    def make():
        envs = gym.vector.SyncVectorEnv(
            [partial(Numbered, [n]) for n in (1, 4, 9)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        return AMAGOEnv(envs, env_name="Numbered", batched_envs=3)

    _, by_actor = counted(make_pool([make], env_mode="already_vectorized", parallel_actors=3), 7)
    assert by_actor == {0: [0, 1, 2], 1: [0, 1], 2: [0, 1]}


def test_a_rollout_that_a_fault_has_dropped_is_made_up_for(tmp_path):
    makers = [make_counting(0), make_counting(1, fault="raise", flag=str(tmp_path / "failed"))]
    _, by_actor = counted(make_pool(makers, env_mode="sync", parallel_actors=2), 6)
    assert (tmp_path / "failed").exists()
    assert [len(found) for found in by_actor.values()] == [3, 3]


def mean_of_many(times, timesteps, mode="sync", **options):
    """Mean return of many short evaluations by 16 actors of `GoodIsLong` in a pool of this mode, and the number of rollouts."""

    def vectorised():
        envs = gym.vector.SyncVectorEnv([GoodIsLong] * 16, autoreset_mode=gym.vector.AutoresetMode[mode])
        return AMAGOEnv(envs, "E", batched_envs=16)

    if mode in ("sync", "async"):
        pool = make_pool([partial(AMAGOEnv, GoodIsLong(), env_name="E") for _ in range(16)], env_mode=mode, workers=2, seed=0)
    else:
        pool = make_pool([vectorised], env_mode="already_vectorized", parallel_actors=16, seed=0)
    with closing(pool):
        metrics = [evaluate(Idle(), pool, timesteps, **options) for _ in range(times)]
    rollouts = sum(m[NUMBER_OF_ROLLOUTS] for m in metrics)
    return sum(m[AVERAGE_RETURN] * m[NUMBER_OF_ROLLOUTS] for m in metrics) / rollouts, rollouts


@pytest.mark.parametrize("mode", ["episodes", "sync", "async", "SAME_STEP", "NEXT_STEP"])
def test_the_mean_is_unbiased_where_good_rollouts_are_long(mode):
    if mode == "episodes":
        mean, rollouts = mean_of_many(30, FOR_EVER, episodes=16)
        assert rollouts == 480
    else:
        mean, rollouts = mean_of_many(10, 210, mode)
        assert rollouts >= 0.95 * 10 * 2 * 16, "two of each actor fit"
    assert abs(mean - 0.5) < 3 * 0.5 / np.sqrt(rollouts)


def test_first_rollouts_that_do_not_end_are_named():
    told = pytest.warns(UserWarning, match="first rollout of 1 of 2 actors did not end within 20 steps")
    with closing(pool_of([[3], [50]])) as pool, told:
        metrics = evaluate(Idle(), pool, 20)
    assert metrics[NUMBER_OF_ROLLOUTS] == 1


def test_the_rule_of_the_original_system_favours_short_rollouts():
    config.parse_files(["zoo/original"])
    mean, rollouts = mean_of_many(30, FOR_EVER, episodes=16)
    assert rollouts >= 480
    assert mean < 0.3


def test_validation_may_be_sized_by_rollouts(tmp_path):
    e = tiny.learned(
        tmp_path, tiny.cartpole, val_episodes=5, val_timesteps_per_epoch=1000, val_interval=1, train_batches_per_epoch=0
    )
    (row,) = tiny.rows(e.run_dir, "val")
    assert row["values"][NUMBER_OF_ROLLOUTS] == 5


def test_only_the_rollouts_that_count_are_saved(tmp_path):
    e = tiny.started(tmp_path, tiny.cartpole, save_trajs_as="npz")
    e.evaluate_test(tiny.cartpole, FOR_EVER, episodes=7, save_trajs_to=str(tmp_path / "saved"))
    assert len(list((tmp_path / "saved").iterdir())) == 7


def test_the_command_counts_exactly(tmp_path, capsys):
    e = tiny.learned(tmp_path, tiny.cartpole, always_save_latest=True, train_batches_per_epoch=0)
    e.close()
    (e.run_dir / "settings.yaml").write_text("env: an argument of a script\nbatch_size: 4\n")
    (e.run_dir / "train_args.json").write_text(json.dumps({"env": "CartPole-v1", "horizon": 30}))  # of an earlier version
    config.clear()
    assert main(["eval", str(e.run_dir), "--episodes", "3", "--actors", "8"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("Number of Rollouts"))
    assert line.split()[-1] == "3"
