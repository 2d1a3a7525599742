"""Mistakes in the code of an environment end a run at once, with their cause first; crashes do not."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from messages import naming
from run_inside import run_amago

from amago.cli import main
from amago.envs import AMAGOEnv, make_pool
from amago.envs.pool import EnvironmentMistake
from amago.envs.pool.faults import PROVEN_STEPS, ActorError

SPACE = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
LENGTH = 6


class Mistaken(gym.Env):
    """Six steps an episode; from the given step of the given episode on, what ``wrong`` says is wrong."""

    observation_space = SPACE
    action_space = gym.spaces.Discrete(2)

    def __init__(self, wrong="", episode=0, step=1, length=LENGTH):
        self.wrong, self.at, self.length = wrong, (episode, step), length
        self.episode, self.t = -1, 0

    def _is(self, wrong):
        return self.wrong == wrong and (self.episode, self.t) >= self.at

    def _obs(self):
        return np.zeros(3 if self._is("shape") else 2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs() if self._is("reset") else (self._obs(), {})

    def step(self, action):
        self.t += 1
        if self._is("attribute"):
            self.forgotten_name += 1
        if self._is("crash"):
            raise RuntimeError("the simulator has crashed")
        if self._is("four"):
            return self._obs(), 0.0, False, {}
        return self._obs(), None if self._is("reward") else 0.0, self.t == self.length, False, {}


CAUSES = {
    "reward": "TypeError: Mine, step 1: the reward is None, but must be one number",
    "four": "TypeError: Mine, step 1: step() returned 4 values",
    "shape": "ValueError: Mine, step 1: observation",
    "attribute": "AttributeError: 'Mistaken' object has no attribute 'forgotten_name'",
}


def maker(*args, **kwargs):
    return lambda: AMAGOEnv(Mistaken(*args, **kwargs), env_name="Mine")


def play(pool, steps):
    for _ in range(steps):
        pool.step(np.zeros((pool.num_actors, 1), np.int64))


@pytest.mark.parametrize(("wrong", "mode"), [*((wrong, "sync") for wrong in CAUSES), ("attribute", "async")])
def test_a_mistake_before_any_rollout_has_ended_ends_the_run_with_its_cause_first(wrong, mode, caplog):
    with closing(make_pool(maker(wrong), mode, parallel_actors=2, workers=1)) as pool:
        pool.reset()
        with pytest.raises(EnvironmentMistake) as err:
            play(pool, 2)
    message = str(err.value)
    assert message.startswith(CAUSES[wrong])
    assert "actor 0" in message
    assert len(message.splitlines()) < 10
    assert caplog.records == []
    if wrong == "attribute":
        assert "test_mistakes.py" in message
        assert "self.forgotten_name += 1" in message


def test_a_mistake_in_a_batch_of_environments():
    def make():
        envs = gym.vector.SyncVectorEnv([lambda: Mistaken("attribute", step=3) for _ in range(2)])
        return AMAGOEnv(envs, env_name="Mine", batched_envs=2)

    with closing(make_pool([make], "already_vectorized", parallel_actors=2)) as pool:
        pool.reset()
        with pytest.raises(EnvironmentMistake, match="forgotten_name"):
            play(pool, 3)


ENDED, LONG = ({"episode": 1, "step": 2}, LENGTH + 3), ({"step": PROVEN_STEPS + 1, "length": 10**9}, PROVEN_STEPS + 2)


@pytest.mark.parametrize(("mode", "case"), [("sync", ENDED), ("sync", LONG), ("async", ENDED)])
def test_the_same_error_is_a_fault_once_a_rollout_has_ended_or_lasted_long(mode, case):
    where, steps = case
    with closing(make_pool(maker("reward", **where), mode, parallel_actors=2, workers=1)) as pool:
        pool.reset()
        play(pool, steps)
        assert pool.drain().restarts == 2


def test_a_crash_is_no_mistake_and_is_logged_with_its_traceback_once(caplog):
    with closing(make_pool(maker("crash"), "sync", parallel_actors=1, max_env_restarts=40)) as pool:
        pool.reset()
        with pytest.raises(ActorError, match=naming(41, "max_env_restarts", 40, "the simulator has crashed")) as err:
            play(pool, 41)
        assert not isinstance(err.value, EnvironmentMistake)
    lines = caplog.text.splitlines()
    assert sum("Traceback" in line for line in lines) == 1
    assert len(lines) < 50
    assert "32 times so far" in caplog.text


@pytest.mark.filterwarnings("ignore:.*The reward returned by:UserWarning")  # of Gymnasium
def test_the_command_ends_within_one_screen(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import gymnasium as gym\nfrom test_mistakes import Mistaken\ngym.register('Mistaken-v0', lambda: Mistaken('reward'))\n"
    )
    words = "mine:Mistaken-v0 --run-name demo --buffer-dir . --epochs 1 --no-async"
    outcome = run_amago(["train", *words.split()], tmp_path)
    gym.registry.pop("Mistaken-v0")
    assert outcome.code == 1
    assert "amago train: TypeError: mine:Mistaken-v0, step 1: the reward is None, but must be one number" in outcome.text
    assert len(outcome.text.splitlines()) < 32


def test_a_command_that_trained_on_nothing_fails(tmp_path, capsys, registered):
    registered("Endless-v0", lambda **_: Mistaken(length=10**9))
    few = "--epochs 1 --timesteps-per-epoch 5 --no-async --quiet --val-interval 2 --horizon 9"
    assert main(["train", "Endless-v0", "--run-name", "demo", "--buffer-dir", str(tmp_path), *few.split()]) == 1
    assert "has trained on nothing" in capsys.readouterr().err
