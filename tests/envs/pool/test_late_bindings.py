"""Bindings of a class that a worker process imports while it makes the environments."""

import sys

import gin
import pytest
import tiny

from amago import config
from amago.envs import AMAGOEnv, make_pool

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


def test_they_have_their_effect(late):
    def make_env():
        import late_module

        return AMAGOEnv(late_module.Late(), env_name="late")

    with config.temporary({"Late.size": 5}):
        pool = make_pool([make_env], env_mode="async", parallel_actors=1, mp_context="spawn", trial_steps=0)
        pool.reset()
        assert pool.obs["observation"][0, 0] == 0.5
        pool.close()


def test_bindings_of_networks_make_no_environment_twice(tmp_path):
    """Many scripts import their networks where they import their environments."""
    made = tmp_path / "made"

    def make_env():
        import amago.nets.tstep_encoders  # noqa: F401

        with made.open("a") as file:
            file.write("1")
        return tiny.cartpole()

    with config.temporary({"FFTstepEncoder.d_hidden": 7}):
        make_pool([make_env], env_mode="async", parallel_actors=1, mp_context="spawn", trial_steps=0).close()
    assert made.read_text() == "1"


def test_imported_at_the_top_of_the_file_it_has_its_effect(late):
    Late = late.Late

    def make_env():
        return AMAGOEnv(Late(), env_name="late")

    with config.temporary({"Late.size": 5}):
        pool = make_pool([make_env], env_mode="async", parallel_actors=1, mp_context="spawn", trial_steps=0)
        pool.reset()
        assert pool.obs["observation"][0, 0] == 0.5
        pool.close()
