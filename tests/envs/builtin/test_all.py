"""Rules of every built-in environment: Gymnasium's, seeds, pickling, refusals, pictures, and what its page says."""

import ast
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from messages import naming
from support.point_robot import PointRobot
from support.pokemon import PokemonBattle
from support.toy_mixture import ToyMixture

from amago import config
from amago.envs import builtin
from amago.envs.builtin import MazeRunner, MetaFrozenLake, RoomKeyDoor, SymbolicAlchemy, TMazeActive, TMazePassive
from amago.envs.builtin._common import COLOURS
from amago.envs.builtin.ale_retro import AtariGame, RetroArcade
from amago.envs.builtin.babyai import MultitaskMetaBabyAI
from amago.envs.builtin.crafter import CrafterInstructions
from amago.envs.builtin.gymnax_envs import GymnaxCompatibility
from amago.envs.builtin.popgym_envs import MultiDomainPOPGym, POPGymGame
from amago.envs.builtin.procgen_envs import TwoAttemptMTProcgen
from amago.envs.builtin.xland_minigrid import XLandMiniGrid
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

ENVS = [
    (MetaFrozenLake, {"size": 4}), (MetaFrozenLake, {"size": 4, "hard_mode": True, "slip_chance": 0.2}),
    (MetaFrozenLake, {"size": 4, "recover_mode": True, "show_k_progress": False}), (RoomKeyDoor, {"max_episode_steps": 8}),
    (RoomKeyDoor, {"dark": False, "randomize_actions": True, "size": 3}), (TMazePassive, {}), (TMazeActive, {}), (SymbolicAlchemy, {}),
    (MazeRunner, {"size": 7, "randomize_actions": True}), (PointRobot, {}), (ToyMixture, {}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # about a Box of actions
@pytest.mark.parametrize(("cls", "arguments"), ENVS)
def test_gymnasium_accepts_it(cls, arguments, registered):
    registered("Check-v0", cls, kwargs=arguments, disable_env_checker=True, order_enforce=False)
    check_env(gym.make("Check-v0").unwrapped)


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


DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "environments.md").read_text(encoding="utf-8")
NAMES = sorted(builtin.__all__)
OF_OTHER_PACKAGES = (
    AtariGame, CrafterInstructions, GymnaxCompatibility, MultiDomainPOPGym, MultitaskMetaBabyAI, PokemonBattle, POPGymGame, RetroArcade, TwoAttemptMTProcgen,
    XLandMiniGrid,
)  # fmt: skip
DOCUMENTED = {name: ("environments.md", getattr(builtin, name)) for name in NAMES}
DOCUMENTED |= {cls.__name__: ("benchmarks.md", cls) for cls in OF_OTHER_PACKAGES}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_page_gives_arguments_and_defaults(name):
    page, cls = DOCUMENTED[name]
    programs = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    statements = [node.value for program in programs for node in ast.parse(program).body if isinstance(node, ast.Expr)]
    (call,) = (x for x in statements if isinstance(x, ast.Call) and ast.unparse(x.func) == name)
    given = [(ast.unparse(a), inspect.Parameter.empty) for a in call.args]
    given += [(k.arg, ast.literal_eval(k.value)) for k in call.keywords]
    assert given == [(p.name, p.default) for p in inspect.signature(cls).parameters.values()]


@pytest.mark.parametrize("name", NAMES)
def test_every_logged_metric_is_in_the_tables(name: str) -> None:
    cls: type[gym.Env[Any, Any]] = getattr(builtin, name)
    env = cls(4) if name == "MetaFrozenLake" else cls()
    env.reset(seed=0)
    env.action_space.seed(0)
    logged: set[str] = set()
    for _ in range(3000):
        *_, done, _, info = env.step(env.action_space.sample())
        logged |= set(info)
        if done:
            env.reset()
    assert logged
    for key in logged:
        assert key.startswith(AMAGO_ENV_LOG_PREFIX + " ")
        metric = re.sub(r"\d+", "{i}", key.removeprefix(AMAGO_ENV_LOG_PREFIX + " "))
        assert f"| `{metric}`" in PAGE


def test_defaults_can_be_bound_with_gin() -> None:
    config.bind({"MetaFrozenLake.hard_mode": True, "amago.envs.builtin.TMazePassive.corridor_length": 3, "RoomKeyDoor.size": 4})
    try:
        assert builtin.MetaFrozenLake(4).hard_mode is True
        assert builtin.MetaFrozenLake(4, hard_mode=False).hard_mode is False
        assert builtin.TMazePassive().episode_length == 4
        assert (builtin.TMazeActive().corridor_length, builtin.RoomKeyDoor().size) == (10, 4)
    finally:
        config.clear()


CASES = [  # (environment, its arguments, rows and columns of its picture)
    (MetaFrozenLake, {"size": 4}, (4, 4)), (RoomKeyDoor, {"size": 3}, (3, 3)), (MazeRunner, {"size": 5}, (5, 5)),
    (TMazePassive, {"corridor_length": 4}, (3, 5)), (TMazeActive, {"corridor_length": 4}, (3, 6)),
    (TMazePassive, {"corridor_length": 10_000}, (3, 30)), (SymbolicAlchemy, {}, (3, 6)), (PointRobot, {"step_size": 0.5}, (15, 15)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "arguments", "cells"), CASES)
def test_a_picture_follows_the_state_and_changes_nothing(cls, arguments, cells):
    """Two rollouts with one seed, one of them drawn in each step."""
    env, plain = cls(**arguments, render_mode="rgb_array"), cls(**arguments)
    env.action_space.seed(1)
    np.testing.assert_equal(env.reset(seed=2), plain.reset(seed=2))
    frames = [env.render()]
    done = False
    while not done and len(frames) < 40:
        action = env.action_space.sample()
        first, second = env.step(action), plain.step(action)
        np.testing.assert_equal(first, second)
        frames.append(env.render())
        done = first[2]
    assert {(f.shape, f.dtype) for f in frames} == {((24 * cells[0], 24 * cells[1], 3), np.dtype(np.uint8))}
    assert len({f.tobytes() for f in frames}) > 1
    assert np.array_equal(frames[-1], env.render())
    assert plain.render() is None


def cells(picture):
    """The characters of the cells of a picture, a row of them for each of its rows."""
    names = {colour: name for name, colour in reversed(COLOURS.items())}
    return ["".join(names[tuple(pixel)] for pixel in row) for row in picture[12::24, 12::24].tolist()]


def test_everything_is_drawn_in_its_place():
    arguments = {"start_location": (0, 0), "key_location": (1, 0), "goal_location": (1, 1), "render_mode": "rgb_array"}
    room = RoomKeyDoor(True, 3, 5, 20, **arguments)
    room.reset(seed=0)
    seen = [cells(room.render())] + [cells(room.render()) for action in (0, 2, 0) if room.step(action)]
    assert seen == [["AK.", ".G.", "..."], [".a.", ".G.", "..."], ["...", ".a.", "..."], ["AK.", ".G.", "..."]]
    maze = MazeRunner(5, 2, 2, 9, render_mode="rgb_array")
    maze.reset(seed=0)
    rows, places = cells(maze.render()), [maze.position, *maze.goals]
    assert [[c != "#" for c in row] for row in rows] == maze.maze.T.tolist()
    assert "".join(rows[y][x] for x, y in places) == "AGK"
    lake = MetaFrozenLake(4, render_mode="rgb_array")
    lake.reset(seed=1)
    rows = cells(lake.render())
    assert (rows[0][0], rows[3][3]) == ("A", "G")
    np.testing.assert_array_equal([[c == "O" for c in row] for row in rows], lake.holes.T)
