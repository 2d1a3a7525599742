"""DeepMindControl against dm_control's own suite; and other ordinary environments of examples/01_basic_gym.py."""

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from run_inside import run_example
from support.dmc import DeepMindControl
from tiny import rows

from amago.envs import AMAGOEnv


def run(directory: Path, *arguments: str) -> set[str]:
    """Keys of what the example's test logged."""
    run_example("01_basic_gym.py", directory, " ".join(["--horizon 12 --max_seq_len 8", *arguments]))
    return {key for row in rows(directory / "tiny", "test") for key in row["values"]}


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
@pytest.mark.parametrize(
    ("env", "module", "settings"),
    [("LunarLander-v3", "Box2D", "zoo/lunarlander"), ("HalfCheetah-v5", "mujoco", "zoo/halfcheetah")],
    ids=["lander", "cheetah"],
)
def test_example_on_other_environments(env: str, module: str, settings: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SWIG
        pytest.importorskip(module, reason=f"{module} is not installed: pip install 'gymnasium[box2d,mujoco]'")
    assert any(env in key for key in run(tmp_path, "--env", env, "--configs", settings))


@pytest.fixture(scope="module")
def suite() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing display
        pytest.importorskip("shimmy", reason="shimmy is not installed: pip install 'amago[dmc]'")
        found = pytest.importorskip("dm_control.suite", reason="dm_control is not installed: pip install 'amago[dmc]'")
        return found


@pytest.mark.parametrize("name", ["cartpole-swingup", "walker-walk", "reacher-easy"])
def test_steps_are_the_suites(name: str, suite: Any) -> None:
    env = DeepMindControl(name)
    theirs = suite.load(*name.split("-"), task_kwargs={"random": 0})
    env.reset(seed=3)
    theirs.reset()
    inner = env._env.unwrapped._env  # type: ignore[attr-defined]
    # the target of a reacher is part of the model
    theirs.physics.model.geom_pos[:] = inner.physics.model.geom_pos
    with theirs.physics.reset_context():
        theirs.physics.set_state(inner.physics.get_state())
    rng = np.random.default_rng(0)
    for _ in range(40):
        action = rng.uniform(-1, 1, size=env.action_space.shape)
        obs, reward, terminated, truncated, info = env.step(action)
        step = theirs.step(action)
        assert reward == pytest.approx(step.reward, abs=1e-6)
        assert 0.0 <= reward <= 1.0
        assert not terminated
        assert not truncated
        assert info == {}
        assert obs in env.observation_space
        flat = np.concatenate([np.ravel(step.observation[key]) for key in env._env.observation_space])
        np.testing.assert_allclose(obs, flat, rtol=1e-3, atol=1e-4)


def test_time_ends_by_truncation(suite: Any) -> None:
    assert DeepMindControl("cartpole-balance").horizon == 1000
    env = DeepMindControl("dm_control/cartpole-balance-v0", max_episode_steps=7)
    assert env.horizon == AMAGOEnv(env).horizon == 7
    assert env.env_name == "dm_control/cartpole-balance-v0"
    assert AMAGOEnv(env).env_name == "dm_control_cartpole-balance-v0"
    with pytest.raises(gym.error.ResetNeeded):
        env.step(np.zeros(1))
    for _ in range(2):
        env.reset()
        ends = [env.step(np.zeros(1))[2:4] for _ in range(7)]
        assert ends == [(False, False)] * 6 + [(False, True)]
        with pytest.raises(gym.error.ResetNeeded):
            env.step(np.zeros(1))


def test_example_on_deepmind_control(suite: Any, tmp_path: Path) -> None:
    env = "dm_control/cartpole-balance-v0"
    assert any(env.replace("/", "_") in key for key in run(tmp_path, "--env", env))
    with pytest.raises(ValueError, match="there is no task 'dm_control/cartpole-juggle-v0'"):
        run(tmp_path, "--env", "dm_control/cartpole-juggle-v0")
