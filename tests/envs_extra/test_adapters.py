"""Environments of Stable-Baselines3 and PettingZoo as rows."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
from counting_env import CountingEnv, check_traj, is_terminated, length_of, reward_of
from store_helpers import stored

from amago.envs import from_pettingzoo, from_sb3_vec_env


def test_environments_of_stable_baselines3(tmp_path):
    vec = pytest.importorskip("stable_baselines3.common.vec_env", reason="needs stable-baselines3: make test-envs")
    both = [lambda: CountingEnv(0), lambda: CountingEnv(1)]
    e = tiny.learned(
        tmp_path, lambda: from_sb3_vec_env(vec.DummyVecEnv(both), "Counting"), env_mode="already_vectorized", parallel_actors=2,
        train_timesteps_per_epoch=20, val_timesteps_per_epoch=9,
    )  # fmt: skip
    found = stored(e.dataset.buffer_dir)
    e.close()
    assert {check_traj(traj, "discrete")[0] for traj in found} == {0, 1}
    assert {bool(traj.dones[-1, 0]) for traj in found} == {True, False}, "a time limit is no termination"


def test_agents_of_pettingzoo(tmp_path):
    pettingzoo = pytest.importorskip("pettingzoo", reason="needs PettingZoo: make test-envs")

    class Party(pettingzoo.ParallelEnv):
        """Each agent plays a counting environment by itself, and leaves at its end."""

        metadata = {"name": "party"}
        possible_agents = ["ann", "bob"]

        def __init__(self):
            self.games = {"ann": CountingEnv(0), "bob": CountingEnv(1)}

        def observation_space(self, agent):
            return self.games[agent].observation_space

        def action_space(self, agent):
            return self.games[agent].action_space

        def reset(self, seed=None, options=None):
            self.agents = list(self.possible_agents)
            return {a: game.reset()[0] for a, game in self.games.items()}, {a: {} for a in self.agents}

        def step(self, actions):
            assert list(actions) == self.agents
            found = {a: self.games[a].step(actions[a]) for a in self.agents}
            self.agents = [a for a in self.agents if not (found[a][2] or found[a][3])]
            return tuple({a: x[i] for a, x in found.items()} for i in range(5))

    e = tiny.learned(
        tmp_path, lambda: from_pettingzoo(Party(), "Party"), env_mode="already_vectorized", parallel_actors=2, train_timesteps_per_epoch=20,
        val_timesteps_per_epoch=9,
    )  # fmt: skip
    found = stored(e.dataset.buffer_dir)
    e.close()
    assert len(found) >= 4
    for traj in found:
        agent, episode = (int(x) for x in traj.obs["count"][0, 1:3])
        times, left = np.arange(len(traj) + 1), length_of(agent, episode)
        assert traj.obs["count"][:, 0].tolist() == np.minimum(times, left).tolist()
        assert traj.rews[:, 0].tolist() == [reward_of(agent, episode, t) if t <= left else 0.0 for t in times[1:]]
        assert traj.dones[-1, 0] == is_terminated(agent, episode)

    class Mixed(Party):
        def action_space(self, agent):
            return gym.spaces.Discrete(3 if agent == "ann" else 4)

    with pytest.raises(ValueError, match="'bob'"):
        from_pettingzoo(Mixed(), "Mixed")

    class Late(Party):
        def reset(self, seed=None, options=None):
            obs, infos = super().reset()
            return {"ann": obs["ann"]}, infos

    with pytest.raises(ValueError, match="'bob'"):
        from_pettingzoo(Late(), "Late").reset()
