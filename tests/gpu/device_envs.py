"""An environment that counts, with its rows on a device."""

import gymnasium as gym
import numpy as np
import torch

from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv

ROWS = 6
LENGTHS = [3 + row % 4 for row in range(ROWS)]


class Counting(gym.vector.VectorEnv):
    """Row i counts its steps and its rollouts, which last ``LENGTHS[i]`` steps: odd rows terminate, even ones are truncated. The reward is
    10 times the count and the action."""

    def __init__(self, device, mode=gym.vector.AutoresetMode.SAME_STEP, poison=None):
        self.metadata = {"autoreset_mode": mode, "arrays": "torch"}
        self.num_envs, self.device, self.poison, self.steps = ROWS, torch.device(device), poison, 0
        self.single_observation_space = gym.spaces.Dict(
            {
                "count": gym.spaces.Box(0, 99, (2,), np.float64),
                "parity": gym.spaces.Discrete(2),
                "small": gym.spaces.Box(0, 255, (), np.uint8),
            }
        )
        self.single_action_space = gym.spaces.Discrete(3, start=4)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, ROWS)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, ROWS)
        self.lengths = torch.tensor(LENGTHS, device=device)
        self.odd = torch.arange(ROWS, device=device) % 2 == 1

    def observe(self):
        count = torch.stack([self.t, self.rollout], 1).double()
        return {"count": count, "parity": self.t % 2, "small": self.t.to(torch.uint8)}

    def reset(self, *, seed=None, options=None):
        self.t, self.rollout = torch.zeros_like(self.lengths), torch.zeros_like(self.lengths)
        return self.observe(), {}

    def step(self, actions):
        self.steps += 1
        self.t = self.t + 1
        ended, reward = self.t >= self.lengths, 10.0 * self.t + actions - 4
        if self.steps == self.poison:
            reward = reward / 0.0
        last, flags = self.observe(), (ended & self.odd, ended & ~self.odd)
        logged = {f"{AMAGO_ENV_LOG_PREFIX} Last Count": self.t.float()}
        self.t, self.rollout = self.t.masked_fill(ended, 0), self.rollout + ended
        return self.observe(), reward, *flags, {"final_obs": last, "final_info": logged}


def counting(device, **options):
    return lambda: AMAGOEnv(Counting(device, **options), env_name="Counting", batched_envs=ROWS)
