"""Rules of every built-in environment: Gymnasium's, seeds, pickling, and refusals that name what is wrong."""

import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from messages import naming
from support.point_robot import PointRobot
from support.toy_mixture import ToyMixture

from amago.envs.builtin import (
    MazeRunner,
    MetaFrozenLake,
    RoomKeyDoor,
    SymbolicAlchemy,
    TMazeActive,
    TMazePassive,
)

ENVS = [
    (MetaFrozenLake, {"size": 4}), (MetaFrozenLake, {"size": 4, "hard_mode": True, "slip_chance": 0.2}),
    (MetaFrozenLake, {"size": 4, "recover_mode": True, "show_k_progress": False}), (RoomKeyDoor, {"max_episode_steps": 8}),
    (RoomKeyDoor, {"dark": False, "randomize_actions": True, "size": 3}), (TMazePassive, {}), (TMazeActive, {}), (SymbolicAlchemy, {}),
    (MazeRunner, {"size": 7, "randomize_actions": True}), (PointRobot, {}), (ToyMixture, {}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # about a Box of actions
@pytest.mark.parametrize(("cls", "arguments"), ENVS)
def test_gymnasium_accepts_it(cls, arguments):
    name = f"{cls.__name__}Check-v0"
    gym.register(name, entry_point=cls, kwargs=arguments, disable_env_checker=True, order_enforce=False)
    try:
        check_env(gym.make(name).unwrapped)
    finally:
        del gym.registry[name]


def rollout(env, seed, steps=300):
    """Text of a seeded rollout and the next; arrays that were handed out must stay as they were."""
    env.action_space.seed(1)
    out = [env.reset(seed=seed)]
    kept = [pickle.dumps(out[0])]
    for _ in range(steps):
        out.append(env.step(env.action_space.sample()))
        kept.append(pickle.dumps(out[-1]))
        assert out[-1][0] in env.observation_space
        assert [type(x) for x in out[-1][1:4]] == [float, bool, bool]
        assert out[-1][3] is False
        if out[-1][2]:
            out.append(env.reset())
            kept.append(pickle.dumps(out[-1]))
    assert repr(out) == repr([pickle.loads(x) for x in kept])
    return repr(out)


@pytest.mark.parametrize(("cls", "arguments"), ENVS)
def test_one_seed_one_rollout_and_a_pickled_one_goes_on(cls, arguments):
    used = cls(**arguments)
    other = rollout(used, 6)
    assert rollout(cls(**arguments), 5) == rollout(used, 5) != other
    used.reset(seed=3)
    copy = pickle.loads(pickle.dumps(used))
    assert rollout(used, None, 5) == rollout(copy, None, 5)


WRONG = [
    (SymbolicAlchemy, {"num_trials": 0}, ValueError), (SymbolicAlchemy, {"num_trials": 2.5}, TypeError),
    (SymbolicAlchemy, {"steps_per_trial": True}, TypeError), (MetaFrozenLake, {"size": 1}, ValueError),
    (MetaFrozenLake, {"size": 4, "max_episode_steps": 0}, ValueError), (MetaFrozenLake, {"size": 4, "slip_chance": 1.0}, ValueError),
    (MetaFrozenLake, {"size": 4, "slip_chance": float("nan")}, ValueError), (MetaFrozenLake, {"size": 4, "hard_mode": 1}, TypeError),
    (MazeRunner, {"size": 8}, ValueError), (MazeRunner, {"min_goals": 4}, ValueError), (MazeRunner, {"size": 5, "max_goals": 7}, ValueError),
    (MazeRunner, {"loop_chance": 1.5}, ValueError), (RoomKeyDoor, {"meta_rollout_horizon": -5}, ValueError),
    (RoomKeyDoor, {"key_location": "corner"}, ValueError), (RoomKeyDoor, {"size": 4, "goal_location": (4, 0)}, ValueError),
    (RoomKeyDoor, {"start_location": (1, 1), "goal_location": (1, 1)}, ValueError), (PointRobot, {"k_episodes": 1.5}, TypeError),
    (PointRobot, {"goal_region": "disc"}, ValueError), (PointRobot, {"rewards": "sparse"}, ValueError),
    (PointRobot, {"step_size": 0.0}, ValueError), (TMazePassive, {"corridor_length": 0}, ValueError), (TMazeActive, {"penalty": 0.1}, ValueError),
    (ToyMixture, {"task": "walk"}, ValueError),
    *((cls, {"render_mode": "human"}, ValueError) for cls in (SymbolicAlchemy, MazeRunner, PointRobot, TMazeActive)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "arguments", "error"), WRONG)
def test_wrong_arguments_are_named(cls, arguments, error):
    name, value = list(arguments.items())[-1]
    with pytest.raises(error, match=naming(name, value)):
        cls(**arguments)


ACTIONS = [(9999, ValueError), (-1, ValueError), (0.5, TypeError)]
POINTS = [([1.1, 0], ValueError), ([0, float("nan")], ValueError), ([0.0], ValueError), (1, ValueError)]


@pytest.mark.parametrize(("cls", "arguments"), ENVS)
def test_wrong_actions_and_steps_without_a_reset_are_refused(cls, arguments):
    env = cls(**arguments)
    with pytest.raises(gym.error.ResetNeeded, match=naming("step", "reset()")):
        env.step(np.zeros(2) if cls is PointRobot else 0)
    env.reset(seed=0)
    for action, error in POINTS if cls is PointRobot else ACTIONS:
        with pytest.raises(error, match=naming("action")):
            env.step(action)
