"""A binding of a class that a worker process imports too late is refused, rather than ignored."""

import sys

import gin
import pytest

from amago import config
from amago.envs import AMAGOEnv, make_pool
from amago.envs.pool import ActorError

MODULE = """
import gin
import gymnasium as gym
import numpy as np


@gin.configurable(module="late_module")
class Late(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, size=1):
        self.size = size

    def reset(self, *, seed=None, options=None):
        return np.full(1, self.size / 10, np.float32), {}

    def step(self, action):
        return np.full(1, self.size / 10, np.float32), 0.0, True, False, {}
"""


@pytest.fixture
def late(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    import late_module

    yield late_module
    sys.modules.pop("late_module")
    gin.config._REGISTRY._selector_map.pop("late_module.Late", None)


def test_it_is_refused_by_name(late):
    def make_env():
        import late_module

        return AMAGOEnv(late_module.Late(), env_name="late")

    with (
        config.temporary({"Late.size": 5}),
        pytest.raises(ActorError, match=r"late_module\.Late\.size: bound, but without effect"),
    ):
        make_pool([make_env], env_mode="async", parallel_actors=1, mp_context="spawn", trial_steps=0)


def test_imported_at_the_top_of_the_file_it_has_its_effect(late):
    Late = late.Late

    def make_env():
        return AMAGOEnv(Late(), env_name="late")

    with config.temporary({"Late.size": 5}):
        pool = make_pool([make_env], env_mode="async", parallel_actors=1, mp_context="spawn", trial_steps=0)
        pool.reset()
        assert pool.obs["observation"][0, 0] == 0.5
        pool.close()
