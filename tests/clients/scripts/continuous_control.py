"""Continuous actions and bits: environments with hooks of a client's own, and the distributions by name (G, A)."""

import gymnasium as gym
import numpy as np
from small import SIZES, experiment

import amago
from amago.cli_utils import use_config
from amago.envs.env_utils import ContinuousActionWrapper, MultiBinaryActionWrapper, space_convert


class Hedge(gym.Env):
    """Follow a number that changes slowly."""

    action_space = gym.spaces.Box(-2.0, 4.0, (2,), np.float32)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.level = 0, self.np_random.normal(size=2)
        return self.level.astype(np.float32), {"level": self.level}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float32)), action
        reward, self.t = -float(np.abs(action - self.level).sum()), self.t + 1
        self.level += 0.1 * self.np_random.normal(size=2)
        return self.level.astype(np.float32), reward, False, self.t == 8, {}


class Bits(Hedge):
    action_space = gym.spaces.MultiBinary(2)

    def step(self, action):
        assert action.dtype == np.int8 and action.shape == (2,)
        return super().step(action)


class HedgeAMAGO(amago.envs.AMAGOEnv):
    def __init__(self, cls=Hedge):
        super().__init__(env=cls(), env_name=None)
        self.observation_space["first"] = gym.spaces.Box(0, 1, (1,), dtype=bool)
        assert self.action_size == 2 and self.action_space.shape == (2,) and self.action_dtype == np.float32

    @property
    def env_name(self):
        return f"{type(self.env.unwrapped).__name__}"

    def inner_reset(self, *args, **kwargs):
        obs, info = self.env.reset(*args, **kwargs)
        return {"observation": obs, "first": np.array([True])}, info

    def inner_step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return {"observation": obs, "first": np.array([False])}, reward, terminated or truncated, truncated, info


if __name__ == "__main__":
    raw = ContinuousActionWrapper(Hedge())
    raw.reset()
    raw.step(np.array([-1.0, 1.0], np.float32))
    assert np.allclose(raw.action(np.array([-1.0, 1.0])), [-2.0, 4.0])
    assert MultiBinaryActionWrapper(Bits()).action_space == gym.spaces.MultiBinary(2)
    assert space_convert(Hedge.action_space) == Hedge.action_space
    assert amago.envs.env_utils.extend_box_obs_space_by(Hedge.observation_space, 3).shape == (5,)
    for name, cls, dist in (("gmm", Hedge, "GMM"), ("beta", Hedge, "Beta"), ("bits", Bits, "TanhGaussian")):
        use_config(SIZES | {"Actor.continuous_dist_type": getattr(amago.nets.policy_dists, dist)})
        make = lambda cls=cls: HedgeAMAGO(cls)
        agent = amago.Agent if name == "beta" else amago.agent.MultiTaskAgent
        exp = experiment(run_name=name, make_train_env=make, make_val_env=make, agent_type=agent, padded_sampling="both")
        exp.start()
        exp.learn()
        metrics = exp.evaluate_test(make, timesteps=20)
        assert f"Average Total Return in {cls.__name__}" in metrics, metrics
        values = exp.policy.get_values(next(iter(exp.train_dloader)))
        assert values["advantage"].shape == values["filter_weights"].shape
        exp.close()
