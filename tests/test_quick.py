"""``amago.train``: three lines from an environment to an agent."""

from argparse import Namespace

import gymnasium as gym
import numpy as np
import pytest
import tiny
from messages import check_refused, naming
from tiny import rows

import amago
from amago import config
from amago.cli import main
from amago.cli.train import spread_steps
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive
from amago.nets.traj_encoders import GRUTrajEncoder

SMALL = {
    "parallel_actors": 2, "grads_per_epoch": 2, "batch_size": 2, "memory_size": 16, "memory_layers": 1, "max_seq_len": 8, "epochs": 2,
}  # fmt: skip


def limited():
    return gym.wrappers.TimeLimit(tiny.Bits(), 5)


class Uncopied(tiny.Bits):
    def __deepcopy__(self, memo):
        raise RuntimeError("a window is open")


ENVIRONMENTS = {
    "an id": lambda: "CartPole-v1",
    "module:function": lambda: "amago.envs.builtin:TMazePassive",
    "a function": lambda: limited,
    "a function of an AMAGOEnv": lambda: lambda: AMAGOEnv(TMazePassive(5)),
    "an environment with an id": lambda: gym.make("CartPole-v1"),
    "an environment without one": limited,
    "a vectorised environment": lambda: gym.vector.SyncVectorEnv([limited] * 3),
    "a function of a vectorised environment": lambda: lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"),
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_three_lines(kind, tmp_path, monkeypatch, capsys):
    """Nothing is written but where it is asked, and no setting of the process changes."""
    monkeypatch.chdir(tmp_path)
    config.bind({"Agent.tau": 0.02})
    rows = {} if "vectorised" not in kind else {"parallel_actors": None}
    memory = "gru" if kind == "a function" else "auto"
    agent = amago.train(ENVIRONMENTS[kind](), 80, memory, **SMALL | rows)
    assert (type(agent.agent.traj_encoder) is GRUTrajEncoder) == (memory == "gru")
    found = agent.evaluate(episodes=3)
    agent.save(tmp_path / "agent.pt")
    assert ([p.name for p in tmp_path.iterdir()], found["Number of Rollouts"]) == (["agent.pt"], 3)
    assert "3 rollouts" in capsys.readouterr().out
    assert list(config.bindings().values()) == [0.02]
    env = agent.make_env()
    obs, _ = env.env.env.reset(seed=0)
    obs = obs[0] if env.batched_envs > 1 else obs
    assert agent.action_space.contains(agent.act(obs))
    again = amago.load_policy(tmp_path / "agent.pt", sample=False)
    agent.sample = False
    agent.reset()
    assert np.array_equal(again.act(obs), agent.act(obs))


def test_a_run_with_a_directory_goes_on(tmp_path):
    for epochs in (1, 3):
        agent = amago.train(
            "CartPole-v1", 400 * epochs, directory=tmp_path / "pole", seed=0, verbose=False, **SMALL | {"epochs": epochs}
        )
        assert agent.version
    assert [r["epoch"] for r in rows(tmp_path / "pole", "train")] == [0, 1, 2]
    assert main(["eval", str(tmp_path / "pole"), "--episodes", "1"]) == 0, "its environment is known"


@pytest.mark.parametrize(
    ("steps", "given", "epochs", "each"),
    [
        (40_000, {}, 40, 63),  # 16 actors: few steps leave the number of updates as it is
        (1_600_000, {}, 200, 500),
        (40_000, {"epochs": 5}, 5, 500),
        (40_000, {"timesteps_per_epoch": 50}, 50, 50),
    ],
)
def test_a_budget_of_steps(steps, given, epochs, each):
    chosen = {"epochs": 40, "timesteps_per_epoch": 500, "parallel_actors": 16}
    args = Namespace(**chosen | given, steps=steps)
    spread_steps(args, Namespace(**dict.fromkeys(chosen) | given))
    assert (args.epochs, args.timesteps_per_epoch) == (epochs, each)


def test_what_is_refused():
    check_refused(
        TypeError,
        (naming("lerning_rate", "learning_rate"), lambda: amago.train("CartPole-v1", lerning_rate=1e-3)),
        (naming("env", 5), lambda: amago.train(5)),
        ("a function that makes it", lambda: amago.train(Uncopied())),
    )
    check_refused(
        ValueError,
        (naming("Nothing-v0"), lambda: amago.train("Nothing-v0")),
        (naming("--steps", 0), lambda: amago.train("CartPole-v1", steps=0)),
        (naming("parallel_actors", 3), lambda: amago.train(gym.vector.SyncVectorEnv([limited] * 3), steps=80, **SMALL)),
        ("leave one", lambda: amago.train("CartPole-v1", epochs=2, timesteps_per_epoch=5)),
    )
