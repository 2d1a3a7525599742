"""Relabelled rollouts are what the environment would have given; shaping and novelty against sums and counts one by one."""

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import check_refused, naming, refused
from replays import check_equal

from amago import config
from amago.data.trajectory import FrozenTraj, rl2
from amago.hindsight import TrajectoryBuilder
from amago.relabeling import GoalSequenceRelabeler, LastRewardShaping, NoveltyRelabeler
from amago.spaces import action_spec

MOVES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])


class GoalGrid(gym.Env):
    """Visit k cells of a grid in order: reward 1 for each, and -0.25 for bumping into the wall.

    One goal a step at most. Ends with the last goal (terminated), or at the limit (terminated too if the clock is observed).
    """

    def __init__(self, size=4, goals=((3, 3), (0, 1)), limit=12, flat=False, clock=False):
        self.size, self.sequence, self.limit, self.flat, self.clock = size, np.array(goals, np.float32), limit, flat, clock
        k = len(goals)
        shape = (k * 2,) if flat else (k, 2)
        self.action_space = gym.spaces.Discrete(5)
        self.observation_space = gym.spaces.Dict(
            {
                "achieved": gym.spaces.Box(0, size, (2,), np.float32),
                "goals": gym.spaces.Box(-1, size, shape, np.float32),
                "time": gym.spaces.Box(0, 1, (1,), np.float32),
            }
        )

    def _obs(self):
        goals = self.sequence.copy()
        goals[: self.done] = -1
        return {
            "achieved": self.at.astype(np.float32),
            "goals": goals.reshape(self.observation_space["goals"].shape),
            "time": np.array([self.t / self.limit], np.float32),
        }

    def reset(self, *, seed=None, options=None):
        self.at, self.t, self.done = np.zeros(2, int), 0, 0
        return self._obs(), {}

    def step(self, action):
        aim = self.at + MOVES[action]
        self.at = np.clip(aim, 0, self.size - 1)
        self.t += 1
        reward = 0.0 if (aim == self.at).all() else -0.25
        if self.done < len(self.sequence) and (self.at == self.sequence[self.done]).all():
            self.done += 1
            reward += 1.0
        finished = self.done == len(self.sequence)
        late = self.t >= self.limit
        return self._obs(), reward, finished or (late and self.clock), late and not finished, {}


def play(env, actions, goals_from=None):
    """The rollout, until it ends or the actions do; ``goals_from``: (t, goals) that are asked for from time t on."""
    obs, _ = env.reset()
    traj = TrajectoryBuilder(action_spec(env.action_space), "grid").start(obs)
    for t, a in enumerate(actions):
        if goals_from is not None and t == goals_from[0]:
            env.sequence = np.array(goals_from[1], np.float32)
        obs, reward, terminated, truncated, _ = env.step(a)
        traj.add(a, reward, terminated, obs)
        if terminated or truncated:
            break
    return traj.freeze()


def copy(traj):
    return traj.to_stored(action_spec(gym.spaces.Discrete(5))).slice(0, len(traj)).derive(action_spec(gym.spaces.Discrete(5)))


CELLS = st.tuples(st.integers(0, 3), st.integers(0, 3))
GOALS = st.lists(CELLS, min_size=1, max_size=4)
ACTIONS = st.lists(st.integers(0, 4), min_size=1, max_size=25)
STRATEGY = st.sampled_from(["some", "all"])
EXAMPLES = settings(max_examples=250, deadline=None)


@EXAMPLES
@given(
    GOALS, ACTIONS, STRATEGY, st.integers(0, 2**32 - 1), st.booleans(), st.booleans(), st.integers(3, 25), st.just(0) | st.integers(0, 24),
)  # fmt: skip
def test_relabelled_rewards_are_those_of_replaying_the_environment(goals, actions, strategy, seed, flat, clock, limit, cut):
    """Also of a piece of a rollout, which is relabelled from where it begins: it is not asked again for what was reached before."""
    settings = {"flat": flat, "clock": clock, "limit": limit}
    traj = play(GoalGrid(goals=goals, **settings), actions)
    cut %= len(traj)
    done_before = int((traj.obs["goals"][cut].reshape(-1, 2) == -1).all(axis=-1).sum())
    new = GoalSequenceRelabeler(strategy)(copy(traj.slice(cut, len(traj))), np.random.default_rng(seed))
    asked = [*np.array(goals)[:done_before], *new.obs["goals"][0].reshape(-1, 2)[done_before:]]
    replayed = play(GoalGrid(goals=goals, **settings), actions, (cut, asked))
    replayed.obs["goals"][cut] = new.obs["goals"][0]  # the observation before the change
    check_equal(new, replayed.slice(cut, len(replayed)))


@EXAMPLES
@given(GOALS, ACTIONS, st.integers(0, 2**32 - 1))
def test_all_goals_are_reached_where_there_is_time_for_them(goals, actions, seed):
    traj = play(GoalGrid(goals=goals, limit=99), actions)
    new = GoalSequenceRelabeler("all")(copy(traj), np.random.default_rng(seed))
    if len(traj) >= len(goals):
        assert new.dones[-1]
        assert (new.obs["goals"][-1] == -1).all()
    assert new.rews.sum() >= traj.rews[: len(new)].sum()
    assert len(new) <= len(traj)


def test_other_rewards_units_and_endings():
    config.bind({"GoalSequenceRelabeler.goal_reward": 5.0})
    traj = play(GoalGrid(goals=[(3, 3)], limit=20), [1, 2, 2])
    relabeler = GoalSequenceRelabeler("all", terminates=False)
    rewards = set()
    for seed in range(30):
        new = relabeler(copy(traj), np.random.default_rng(seed))
        assert len(new) == 3
        assert not new.dones.any()
        np.testing.assert_array_equal(new.rl2s[1:, 0], new.rews[:, 0])
        rewards.add(tuple(new.rews[:, 0].tolist()))
    # the wall costs .25; standing at the start is reached first at time 2
    assert rewards == {(5.0, 0.0, -0.25), (0.0, 5.0, -0.25)}


def test_wrong_arguments_and_observations_are_named():
    traj = play(GoalGrid(), [1, 1])
    check_refused(
        ValueError,
        (naming("strategy", "'most'", "'none'", "'some'", "'all'"), lambda: GoalSequenceRelabeler("most")),
        (naming("tolerance", -1), lambda: GoalSequenceRelabeler(tolerance=-1)),
        (naming("goal_key", "achieved_key", "'x'"), lambda: GoalSequenceRelabeler(goal_key="x", achieved_key="x")),
        (naming("goal_key", "'aims'", ["achieved", "goals", "time"]), lambda: GoalSequenceRelabeler(goal_key="aims")(traj)),
        (naming("'time'", (1,), 2, "'achieved'"), lambda: GoalSequenceRelabeler(goal_key="time")(traj)),
    )


def rollout(rewards, done=False, before=0.0):
    """A rollout, or a piece of one that begins with the reward ``before``, with these rewards."""
    t = len(rewards)
    rews = np.array(rewards, np.float32)[:, None]
    dones = np.zeros((t, 1), bool)
    dones[-1] = done
    observed = rl2(np.concatenate(([[before]], rews)), np.zeros((t + 1, 2), np.float32))
    obs = {"observation": np.arange(t + 1, dtype=np.float32)[:, None]}
    return FrozenTraj(obs, observed, np.arange(t + 1)[:, None], rews, dones, np.zeros((t, 2), np.float32))


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20), st.booleans(), st.sampled_from([0.0, 0.5, 0.97]),
    st.sampled_from([None, 0.0, 2.0]), st.floats(-10, 10, width=32),
)  # fmt: skip
def test_returns_change_by_the_potentials_of_both_ends(rewards, done, gamma, coeff, before):
    traj = rollout(rewards, done, before)
    new = LastRewardShaping(gamma, coeff)(traj)
    c = 1 / (1 - gamma) if coeff is None else coeff
    for start in range(len(rewards)):
        discounts = gamma ** np.arange(len(rewards) - start)
        change = (discounts * (new.rews - traj.rews)[start:, 0]).sum()
        end = 0.0 if done else gamma ** (len(rewards) - start) * c * rewards[-1]
        first = before if start == 0 else rewards[start - 1]
        assert change == pytest.approx(end - c * first, abs=2e-2)


def walk(places, rewards=None, clock=False):
    """A rollout through places on a line, with a reward for each step."""
    t = len(places) - 1
    rews = np.zeros(t) if rewards is None else np.asarray(rewards)
    obs = {"at": np.asarray(places, np.float32)[:, None]}
    if clock:
        obs["clock"] = np.arange(t + 1, dtype=np.int64)[:, None]
    return FrozenTraj(
        obs=obs, rl2s=np.zeros((t + 1, 3), np.float32), time_idxs=np.arange(t + 1)[:, None], rews=rews.astype(np.float32)[:, None],
        dones=np.zeros((t, 1), bool), actions=np.zeros((t, 2), np.float32),
    )  # fmt: skip


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 2))
def test_the_bonus_falls_with_the_visits_to_what_a_step_leads_to(places, decay, coeff):
    rewards = np.linspace(-1, 1, len(places) - 1)
    traj = walk(places, rewards)
    before, inputs = traj.rews.copy(), traj.rl2s.copy()
    new = NoveltyRelabeler(coeff, decay)(traj)
    seen = Counter(places[:1])
    for t, place in enumerate(places[1:]):
        seen[place] += 1
        assert new.rews[t, 0] == pytest.approx(rewards[t] + coeff * seen[place] ** -decay, abs=1e-5)
    assert np.array_equal(traj.rews, before), "the stored rewards stay"
    assert np.array_equal(new.rl2s, inputs), "what the policy sees stays"


def test_what_is_new_alone():
    new = NoveltyRelabeler(0.5, float("inf")).relabel(walk([0, 1, 1, 0, 2]))
    assert new.rews[:, 0].tolist() == [0.5, 0, 0, 0.5]


def test_a_clock_is_left_out_and_near_numbers_are_the_same():
    assert NoveltyRelabeler(1.0, np.inf)(walk([0, 0, 0], clock=True)).rews.sum() == 2
    assert NoveltyRelabeler(1.0, np.inf, keys=["at"])(walk([0, 0, 0], clock=True)).rews.sum() == 0
    near = walk([0.0, 0.04, 0.4, 0.44, -0.04])
    assert NoveltyRelabeler(1.0, np.inf).relabel(near).rews.sum() == 4
    assert NoveltyRelabeler(1.0, np.inf, resolution=0.25).relabel(near).rews[:, 0].tolist() == [0, 1, 0, 0]


def test_chosen_numbers_are_counted_in_the_order_of_the_keys():
    traj = walk([0, 0, 1], clock=True)
    assert NoveltyRelabeler(1.0, np.inf, features=[0]).relabel(traj).rews[:, 0].tolist() == [0, 1], "alphabetical: at, clock"
    assert NoveltyRelabeler(1.0, np.inf, features=[1]).relabel(traj).rews[:, 0].tolist() == [1, 1]
    assert NoveltyRelabeler(1.0, np.inf, keys=["clock", "at"], features=[1]).relabel(traj).rews[:, 0].tolist() == [0, 1]
    with refused(ValueError, "features has 2, but the observations that are counted have 2 numbers"):
        NoveltyRelabeler(features=[0, 2]).relabel(traj)


def test_wrong_settings_are_refused_by_name():
    wrong = [("coeff", -0.1), ("coeff", np.inf), ("decay", -1.0), ("keys", "at"), ("resolution", 0.0), ("features", [0, -1])]
    check_refused(
        ValueError,
        *((naming(name), lambda name=name, value=value: NoveltyRelabeler(**{name: value})) for name, value in wrong),
        *(
            (name, lambda name=name, value=value: LastRewardShaping(**{name: value}))
            for name, value in (("gamma", 1.0), ("coeff", -1.0))
        ),
        (naming("'there'", ["at"]), lambda: NoveltyRelabeler(keys=["there"])(walk([0, 1]))),
    )
