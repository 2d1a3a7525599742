"""A vectorised environment with the batch dimension in its spaces, that begins anew by itself (A)."""

import gymnasium as gym
import numpy as np
from small import SIZES, experiment

import amago
from amago.cli_utils import use_config

ROWS = 5


class Rows(gym.Env):
    """Positions that move left and right; each row ends after its own number of steps."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (ROWS, 2), np.float32)
        self.action_space = gym.spaces.MultiDiscrete([2] * ROWS)
        self.single_action_space = gym.spaces.Discrete(2)
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.at, self.steps = np.zeros(ROWS), np.zeros(ROWS, int)
        return self.see(), {}

    def see(self):
        return np.stack((self.at, self.steps / 10), 1).astype(np.float32)

    def step(self, action):
        assert action.shape == (ROWS,)
        self.at += 2.0 * action - 1
        self.steps += 1
        reward = (self.at > 0).astype(np.float32)
        done = self.steps >= 6 + np.arange(ROWS)
        self.at[done], self.steps[done] = 0.0, 0
        return self.see(), reward, done, np.zeros(ROWS, bool), {}


class RowsAMAGO(amago.envs.AMAGOEnv):
    def __init__(self):
        super().__init__(Rows(), env_name="rows", batched_envs=ROWS)

    @property
    def env_name(self):
        return "rows"

    def step(self, action):
        timestep, reward, terminated, truncated, info = super().step(action)
        info[f"{amago.envs.AMAGO_ENV_LOG_PREFIX} Place"] = self.env.unwrapped.at.copy()
        info[f"_{amago.envs.AMAGO_ENV_LOG_PREFIX} Place"] = np.ones(ROWS, bool)
        return timestep, reward, terminated, truncated, info


if __name__ == "__main__":
    use_config(SIZES)
    exp = experiment(
        make_train_env=RowsAMAGO, make_val_env=RowsAMAGO, parallel_actors=ROWS, env_mode="already_vectorized", force_reset_train_envs_every=2,
        agent_type=amago.Agent, traj_encoder_type=amago.nets.traj_encoders.get_traj_encoder_cls("rnn"),
    )  # fmt: skip
    exp.start()
    exp.learn()
    metrics = exp.evaluate_test(RowsAMAGO, timesteps=30)
    assert "Average Total Return in rows" in metrics, metrics
    env = RowsAMAGO()
    t, _ = env.reset()
    assert t.obs["observation"].shape == (ROWS, 2) and t.batched_envs == ROWS
    t, r, te, tr, _ = env.step(np.ones((ROWS, 1), np.uint8))
    assert r.shape == te.shape == (ROWS,) and env.step_count.tolist() == [1] * ROWS and t.prev_action.shape == (ROWS, 2)
