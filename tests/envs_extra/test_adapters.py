"""Environments of Stable-Baselines3 and PettingZoo as rows."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
from counting_env import CountingEnv, check_traj
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
        """Agent i leaves after 3 + i steps; each observes its number and its step, and is paid its action."""

        metadata = {"name": "party"}
        possible_agents = ["ann", "bob"]

        spaces = gym.spaces.Box(0, 99, (2,), np.float32), gym.spaces.Discrete(3)

        def observation_space(self, agent):
            return self.spaces[0]

        def action_space(self, agent):
            return self.spaces[1]

        def reset(self, seed=None, options=None):
            self.agents, self.t = list(self.possible_agents), 0
            return self._observed(), {a: {} for a in self.agents}

        def _observed(self):
            return {a: np.array([self.possible_agents.index(a), self.t], np.float32) for a in self.agents}

        def step(self, actions):
            assert list(actions) == self.agents
            self.t += 1
            obs = self._observed()
            over = {a: self.t == 3 + self.possible_agents.index(a) for a in self.agents}
            rewards, never = {a: float(actions[a]) for a in self.agents}, dict.fromkeys(self.agents, False)
            self.agents = [a for a in self.agents if not over[a]]
            return obs, rewards, over, never, {a: {} for a in actions}

    e = tiny.learned(
        tmp_path, lambda: from_pettingzoo(Party(), "Party"), env_mode="already_vectorized", parallel_actors=2, train_timesteps_per_epoch=9,
        val_timesteps_per_epoch=9,
    )  # fmt: skip
    found = stored(e.dataset.buffer_dir)
    e.close()
    assert len(found) >= 4
    for traj in found:
        agent = int(traj.obs["observation"][0, 0])
        assert traj.obs["observation"][:, 1].tolist() == ([0, 1, 2, 3, 3] if agent == 0 else [0, 1, 2, 3, 4])
        assert traj.dones[-1, 0]
        paid = traj.rews[:, 0].tolist()
        chosen = traj.actions[:, 0].tolist()
        assert paid == (chosen[:3] + [0.0] if agent == 0 else chosen)

    class Mixed(Party):
        def action_space(self, agent):
            return gym.spaces.Discrete(3 if agent == "ann" else 4)

    with pytest.raises(ValueError, match="'bob'"):
        from_pettingzoo(Mixed(), "Mixed")

    class Late(Party):
        def _observed(self):
            return {a: obs for a, obs in super()._observed().items() if a != "bob"}

    with pytest.raises(ValueError, match="'bob'"):
        from_pettingzoo(Late(), "Late").reset()
