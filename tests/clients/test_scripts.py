"""Programs written for the original system, each run as it is in a process of its own: they train, evaluate, and check what they rely on."""

import json
import subprocess
import sys
from pathlib import Path

import tiny

HERE = Path(__file__).parent
SCRIPTS = sorted(p for p in HERE.glob("scripts/*.py") if p.stem != "small")


def run(root, script, *argv, warnings="default"):
    command = [sys.executable, "-W", warnings, *map(str, (script, *argv))]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=tiny.environment(), timeout=200)


def output(done):
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def told(done):
    return json.loads(output(done).splitlines()[-1])


PIECE = """
import os, runpy, sys, warnings
warnings.simplefilter("error", UserWarning)
os.makedirs({root!r})
os.chdir({root!r})
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, {root!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_all_run(tmp_path):
    root, folder = tmp_path / "scripts", str(HERE / "scripts")
    pieces = {p.stem: {p.stem: PIECE.format(script=str(p), root=str(root / p.stem), folder=folder)} for p in SCRIPTS}
    command = [sys.executable, str(HERE.parent / "compat" / "in_fresh_processes.py")]
    done = subprocess.run(
        command, input=json.dumps(pieces), capture_output=True, text=True, env=tiny.environment(), timeout=280
    )
    tracebacks = told(done)
    assert tracebacks.keys() == pieces.keys()
    assert not any(tracebacks.values()), "\n".join(tracebacks.values())


def test_a_controller_acts_step_by_step(tmp_path):
    """With ``step_controller.py``."""
    found = told(run(tmp_path, HERE / "step_controller.py", tmp_path, warnings="error::DeprecationWarning:__main__"))
    for mode in ("sync", "async"):
        assert found[f"{mode} ratings"] == [1000, 1050, 1000, 1050]
        assert (found[f"{mode} breaks"], found[f"{mode} matches"]) == ([15] * 4, [2] * 4)
        assert found[f"{mode} score agrees"]
        assert found[f"{mode} names"] == ["duel_rookie", "duel_veteran"]
        assert found[f"{mode} halves"] == [0] * 4 + [1] * 4
        assert "Bottom Quintile Total Return in duel_veteran" in found[f"{mode} metrics"]
        assert found[f"{mode} copycat"] == found[f"{mode} rounds"] == 8.0


def test_a_subclass_with_its_own_pool_loaders_and_loop(tmp_path):
    first = told(run(tmp_path, HERE / "relay_experiment.py", tmp_path, 3))
    assert (first["began"], first["ended"]) == ([0, 0], [2, 12])
    assert ((first["teams"], first["swaps"], first["test"]), first["memory"][1]) == ((4, 1, 3.0), 3)
    assert first["files"] == 18
    second = told(run(tmp_path, HERE / "relay_experiment.py", tmp_path, 5, "--ckpt", 2))
    assert (second["began"], second["ended"]) == ([3, 12], [4, 20])
    assert second["weights at start"] == first["weights"]
    assert second["moments"] != 0
    assert second["files"] == 30
    rows = tiny.rows(tmp_path / "relay")
    assert {r["section"] for r in rows} == {"val", "collect", "buffer", "train", "test"}
    assert [r["values"]["Swaps"] for r in rows if r["section"] == "train"] == [0.0] * 8 + [1.0] * 4 + [0.0] * 4 + [1.0] * 4


# ---- classes of ``__main__``, configured by gin, which act in processes of their own ------------------------------------------

ONE_FILE = '''
import gin
import gymnasium as gym
import numpy as np

import amago
import tiny
from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.exploration import ExplorationWrapper
from amago.nets.actor_critic import Actor


@gin.configurable
class Uniform(ExplorationWrapper):
    """Now and then any action."""

    def __init__(self, amago_env, rate=0.0):
        super().__init__(amago_env)
        assert rate == 0.25, rate
        self.rate = rate

    def reset(self, *args, **kwargs):
        out = super().reset(*args, **kwargs)
        self.rng = np.random.default_rng()
        return out

    def add_exploration_noise(self, action, local_step):
        other = self.rng.integers(0, self.action_space.n, size=action.shape)
        return np.where(self.rng.random(action.shape) < self.rate, other, action).astype(np.uint8)


@gin.configurable
class Short(AMAGOEnv):
    def __init__(self, length=3):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=length), env_name=f"short_{length}")


@gin.configurable
class Head(Actor):
    """Stays in this process; the workers are told of its binding all the same."""


@gin.configurable
def make_short(suffix="none"):
    assert suffix == "given"
    return Short()


if __name__ == "__main__":
    bindings = {"Uniform.rate": 0.25, "Short.length": 7, "make_short.suffix": "given", "MultiTaskAgent.actor_type": Head}
    cli_utils.use_config(bindings | tiny.TWO_HOT)
    experiment = tiny.learned(
        ".", make_short, make_val_env=lambda: Short(), env_mode="async", env_workers=1, agent_type=amago.agent.MultiTaskAgent,
        exploration_wrapper_type=Uniform,
    )
    print(sorted(experiment.evaluate_test(Short, timesteps=20)))
    experiment.close()
'''


def test_its_classes_reach_the_workers_with_their_settings(tmp_path):
    (tmp_path / "client.py").write_text(ONE_FILE)
    assert "'Average Total Return in short_7'" in output(run(tmp_path, "client.py"))
