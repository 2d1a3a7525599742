"""How many rollouts an evaluation counts, and which: neither fast nor slow ones are favoured."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amago import config
from amago.envs import AMAGOEnv, make_pool
from amago.run.evaluate import AVERAGE_RETURN, NUMBER_OF_ROLLOUTS, evaluate
from amago.run.rollout import Rollout, shares

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


class FailsOnce(Numbered):
    """Raises in its second rollout, the first time that there is one."""

    failed = False

    def step(self, action):
        if self.n == 1 and not FailsOnce.failed:
            FailsOnce.failed = True
            raise RuntimeError("a fault of the environment")
        return super().step(action)


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


def numbered(lengths, env_type=Numbered):
    return AMAGOEnv(env_type(lengths), env_name="Numbered")


def pool_of(lengths, **options):
    makers = [partial(numbered, each) for each in lengths]
    return make_pool(makers, parallel_actors=len(makers), **({"env_mode": "sync"} | options))


def counted(pool, episodes, timesteps=FOR_EVER, **options):
    """Steps of each actor, and {actor: returns of the rollouts that count}."""
    try:
        rollout = Rollout(pool, **options)
        rollout.reset()
        taken, stats = rollout.run_phase(Idle(), timesteps, episodes=episodes)
    finally:
        pool.close()
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
    pool = make_pool(makers, parallel_actors=5, **mode)
    try:
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
    finally:
        pool.close()


def test_a_rollout_that_a_fault_has_dropped_is_made_up_for(monkeypatch):
    monkeypatch.setattr(FailsOnce, "failed", False)
    makers = [partial(numbered, [3]), partial(numbered, [3], FailsOnce)]
    _, by_actor = counted(make_pool(makers, env_mode="sync", parallel_actors=2), 6)
    assert FailsOnce.failed
    assert by_actor == {0: [0, 1, 2], 1: [0, 0, 1]}, "the environment that was replaced begins to count again"


def good_is_long(mode):
    """16 actors of `GoodIsLong` in a pool of this mode."""
    if mode in ("sync", "async"):
        return make_pool([partial(AMAGOEnv, GoodIsLong(), env_name="E") for _ in range(16)], env_mode=mode, workers=2, seed=0)
    autoreset = gym.vector.AutoresetMode[mode]

    def make():
        return AMAGOEnv(gym.vector.SyncVectorEnv([GoodIsLong] * 16, autoreset_mode=autoreset), "E", batched_envs=16)

    return make_pool([make], env_mode="already_vectorized", parallel_actors=16, seed=0)


def mean_of_many(times, timesteps, mode="sync", **options):
    """Mean return of many short evaluations, and the number of rollouts."""
    pool = good_is_long(mode)
    try:
        metrics = [evaluate(Idle(), pool, timesteps, **options) for _ in range(times)]
    finally:
        pool.close()
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
    pool = pool_of([[3], [50]])
    try:
        with pytest.warns(UserWarning, match="first rollout of 1 of 2 actors did not end within 20 steps"):
            metrics = evaluate(Idle(), pool, 20)
    finally:
        pool.close()
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
    e.close()
    (row,) = tiny.rows(e.run_dir, "val")
    assert row["values"][NUMBER_OF_ROLLOUTS] == 5


def test_only_the_rollouts_that_count_are_saved(tmp_path):
    e = tiny.started(tmp_path, tiny.cartpole, save_trajs_as="npz")
    e.evaluate_test(tiny.cartpole, FOR_EVER, episodes=7, save_trajs_to=str(tmp_path / "saved"))
    assert len(list((tmp_path / "saved").iterdir())) == 7
