"""Exploration that sets epsilon by the step, the generator and the factors by itself (R, A)."""

import gin
import numpy as np
from small import SIZES, Recall, experiment, run

import amago
from amago.cli_utils import switch_exploration, use_config
from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy, ExplorationWrapper


@gin.configurable
class LateExploration(EpsilonGreedy):
    def __init__(self, amago_env, rollout_horizon=8, **kwargs):
        super().__init__(amago_env, **kwargs)
        self.rollout_horizon = rollout_horizon

    def reset(self, *args, **kwargs):
        out = super().reset(*args, **kwargs)
        self.rng = np.random.default_rng(3)
        self.global_multiplier = self.rng.random(self.batched_envs) if self.randomize_eps else np.ones(self.batched_envs)
        return out

    def current_eps(self, local_step):
        assert local_step.shape == (self.batched_envs,)
        eps = super().current_eps(local_step)
        eps[local_step < 2] = 0.0
        eps[local_step >= self.rollout_horizon - 1] = 1.0
        return eps


@amago.envs.register_exploration("sticky")
@gin.configurable
class StickyExploration(ExplorationWrapper):
    def __init__(self, amago_env, chance=0.2):
        super().__init__(amago_env)
        self.chance, self.last = chance, None

    def add_exploration_noise(self, action, local_step):
        assert action.shape[0] == len(local_step) == self.batched_envs
        if self.last is not None and self.rng.random() < self.chance:
            action = self.last.astype(action.dtype)
        self.last = np.array(action)
        return action

    @property
    def env_name(self):
        return self.env.env_name


if __name__ == "__main__":
    config = {}
    assert amago.envs.get_exploration_cls("sticky") is StickyExploration
    assert switch_exploration(config, "bilevel", rollout_horizon=8) is BilevelEpsilonGreedy
    use_config(config | SIZES)
    exp = run(experiment(exploration_wrapper_type=LateExploration))
    exp.close()
    exp = run(experiment(exploration_wrapper_type=StickyExploration, run_name="second"))
    env = LateExploration(amago.envs.AMAGOEnv(Recall(), "recall"), steps_anneal=100)
    obs, info = env.reset()
    assert env.global_multiplier.shape == (1,) and env.global_step == 0 and env.discrete
    before = env.global_step
    env.step(env.action(np.array([1], np.uint8)))
    assert env.global_step == before + 1 and env.step_count.shape == (1,)
