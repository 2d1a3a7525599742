"""XLand-MiniGrid: k attempts at tasks with hidden goals and hidden rules (Nikulin et al. 2023, arXiv:2312.12044)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin.jax_envs import JaxRows, RowReset, RowStep, use_after
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX
from amago.registry import require

if TYPE_CHECKING:
    from jax import Array as JaxArray
    from xminigrid.environment import EnvParams
    from xminigrid.types import TimeStep

Bytes = NDArray[np.uint8]
Tile = tuple[int, int]

HOLD, NEAR, TILES_NEAR = 1, 3, 4
"""Goals of XLand-MiniGrid: hold an object, stand beside an object, place two objects side by side."""
HOLD_RULE, NEAR_RULE, TILES_NEAR_RULE = 1, 2, 3
"""Triggers of rules, which turn objects into another: picking an object up, standing beside one, placing two side by side."""
_GOAL_SIZE, _RULE_SIZE = 5, 7

OBJECTS: tuple[Tile, ...] = tuple((shape, colour) for shape in (3, 4, 5, 11, 12) for colour in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11))
"""Balls, squares, pyramids, hexes and stars in ten colours, as (tile, colour)."""


class Size(NamedTuple):
    """The difficulty of tasks: maximum number of rules in the chain that makes an object of the goal, number of rules whose products
    are useless, and number of objects that occur in no rule.
    """

    depth: int
    decoys: int
    others: int


SIZES = {"trivial": Size(0, 0, 3), "small": Size(1, 1, 2), "medium": Size(2, 2, 2), "high": Size(3, 3, 1)}
SPLITS = ("train", "test")
_TEST_SHARE = 5


@dataclass(frozen=True)
class Rulesets:
    """N tasks in the encoding of XLand-MiniGrid, padded with zeros.

    Attributes:
        goals: (N, 5) uint8.
        rules: (N, R, 7) uint8.
        init_tiles: (N, T, 2) uint8, the objects at the start of a shot.
    """

    goals: Bytes
    rules: Bytes
    init_tiles: Bytes

    def __post_init__(self) -> None:
        n = len(self.goals)
        for name, value, shape in (
            ("goals", self.goals, (n, _GOAL_SIZE)), ("rules", self.rules, (n, None, _RULE_SIZE)),
            ("init_tiles", self.init_tiles, (n, None, 2)),
        ):  # fmt: skip
            right = len(value.shape) == len(shape) and all(s is None or s == v for s, v in zip(shape, value.shape))
            if value.dtype != np.uint8 or not right or 0 in value.shape:
                raise ValueError(f"{name} must be uint8 of shape {shape}, got {value.dtype} of shape {value.shape}")

    def __len__(self) -> int:
        return len(self.goals)

    def split(self, which: str) -> Rulesets:
        """The tasks of the split ``which``, "train" or "test"; at least one.

        The split of a task depends on its goal and rules alone, so that no task is in both splits, whatever the seed or the file.
        """
        common.check_choice("split", which, SPLITS)
        tests = np.array([in_test(goal, rules) for goal, rules in zip(self.goals, self.rules)], dtype=bool)
        chosen = tests == (which == "test")
        if not chosen.any():
            raise ValueError(f"none of the {len(self)} tasks is in the split {which!r}")
        return Rulesets(self.goals[chosen], self.rules[chosen], self.init_tiles[chosen])

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` file for `load_rulesets`."""
        np.savez_compressed(path, goals=self.goals, rules=self.rules, init_tiles=self.init_tiles)


def in_test(goal: Bytes, rules: Bytes) -> bool:
    """True if a task belongs to the test split, which has one task in five."""
    used = sorted(bytes(rule) for rule in rules if rule.any())
    return zlib.crc32(bytes(goal) + b"".join(used)) % _TEST_SHARE == 0


def load_rulesets(path: str | Path) -> Rulesets:
    """Read tasks from an ``.npz`` file with the arrays ``goals``, ``rules`` and ``init_tiles``, as written by `Rulesets.save`;
    raises ValueError for other contents.

    The benchmark files of XLand-MiniGrid are pickles, which can run arbitrary code. Convert those that you trust with
    ``numpy.savez(path, goals=..., rules=..., init_tiles=...)``.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return Rulesets(*(np.asarray(file[name]) for name in ("goals", "rules", "init_tiles")))
    except (KeyError, ValueError, AttributeError, TypeError) as err:
        raise ValueError(f"{path} contains no tasks: {err}. It must be an .npz file with goals, rules and init_tiles") from err


def generate_rulesets(size: str = "trivial", num: int = 1000, split: str = "train", seed: int = 0) -> Rulesets:
    """Generate ``num`` different solvable tasks of a size in `SIZES`, for the split "train" or "test"; ``seed`` determines them.

    Each object of the goal is present from the start, or is the product of a rule whose inputs are present or products
    themselves. No object occurs twice in a task, so that decoy rules and unused objects do not make it unsolvable.
    """
    common.check_choice("size", size, SIZES)
    common.check_choice("split", split, SPLITS)
    num, seed = common.check_int("num", num, 1), common.check_int("seed", seed, 0)
    rng, how = np.random.default_rng(seed), SIZES[size]
    most_rules, most_tiles = _most(how)
    seen: set[bytes] = set()
    goals: list[Bytes] = []
    rules: list[Bytes] = []
    tiles: list[Bytes] = []
    while len(goals) < num:
        goal, made_by, lying = _draw(how, rng)
        padded = np.zeros((most_rules, _RULE_SIZE), dtype=np.uint8)
        padded[: len(made_by)] = np.array(made_by, dtype=np.uint8).reshape(-1, _RULE_SIZE)
        there = np.zeros((most_tiles, 2), dtype=np.uint8)
        there[: len(lying)] = lying
        encoded = np.array(goal, dtype=np.uint8)
        key = bytes(encoded) + bytes(padded) + bytes(there)
        if key in seen or in_test(encoded, padded) != (split == "test"):
            continue
        seen.add(key)
        goals.append(encoded)
        rules.append(padded)
        tiles.append(there)
    return Rulesets(np.stack(goals), np.stack(rules), np.stack(tiles))


def _most(how: Size) -> tuple[int, int]:
    """The maximum number of rules (at least 1, so that arrays are not empty) and of objects of a task."""
    made = 2 * (2**how.depth - 1)
    return max(1, made + how.decoys), 2 * 2**how.depth + 2 * how.decoys + how.others


def _draw(how: Size, rng: np.random.Generator) -> tuple[list[int], list[list[int]], list[Tile]]:
    """A random goal, its rules, and the objects at the start."""
    fresh = [OBJECTS[i] for i in rng.permutation(len(OBJECTS))]
    kind = (HOLD, NEAR, TILES_NEAR)[rng.integers(3)]
    wanted = [fresh.pop() for _ in range(2 if kind == TILES_NEAR else 1)]
    goal = _padded([kind, *wanted[0], *(wanted[1] if kind == TILES_NEAR else ())], _GOAL_SIZE)
    rules: list[list[int]] = []
    for _ in range(int(rng.integers(1, how.depth + 1)) if how.depth else 0):
        inputs: list[Tile] = []
        for product in wanted:
            inputs += _rule(rules, product, fresh, rng)
        wanted = inputs
    lying = list(wanted)
    for _ in range(how.decoys):
        lying += _rule(rules, fresh.pop(), fresh, rng)
    lying += [fresh.pop() for _ in range(how.others)]
    return goal, [rules[i] for i in rng.permutation(len(rules))], [lying[i] for i in rng.permutation(len(lying))]


def _rule(rules: list[list[int]], product: Tile, fresh: list[Tile], rng: np.random.Generator) -> list[Tile]:
    """Add a rule with the product ``product`` to ``rules``; returns its inputs."""
    kind = (HOLD_RULE, NEAR_RULE, TILES_NEAR_RULE)[rng.integers(3)]
    inputs = [fresh.pop() for _ in range(2 if kind == TILES_NEAR_RULE else 1)]
    rules.append(_padded([kind, *(number for tile in (*inputs, product) for number in tile)], _RULE_SIZE))
    return inputs


def _padded(numbers: list[int], size: int) -> list[int]:
    return numbers + [0] * (size - len(numbers))


Tables = tuple["JaxArray", "JaxArray", "JaxArray"]
_TILES, _COLOURS, _ACTIONS = 13, 12, 6


@gin.configurable(module="amago.envs.builtin")
class XLandMiniGrid(JaxRows):
    """``num_envs`` worlds (rows), for ``AMAGOEnv(..., batched_envs=num_envs)``; a rollout is k attempts (shots) at one task.

    Each rollout draws a task of `Rulesets`: a goal, and rules by which objects turn into others, both hidden. Each shot places
    the objects at random, and ends at the goal or after ``shot_length`` steps. The rollout terminates (never truncates) with the
    last shot, and the same step begins the next rollout of that row.

    Reward: ``1 - 0.9 * steps / shot_length`` in the step that reaches the goal, else 0.

    Observation, a Dict: "image", uint8 ``(V, V, 25)``, the agent's field of view as one-hot tiles (13) and colours (12);
    "pocket", uint8 ``(25,)``, the object it carries, in the same encoding; "status", float32 ``(7,)``: its direction (4,
    one-hot), 1 at the first observation of a shot, the fraction of shots that are over, and steps of this shot divided by
    ``shot_length``.

    Actions, ``Discrete(6)``: forward, turn right, turn left, pick up, put down, toggle (a door).

    Metrics at the end of a rollout: ``Success in Shot {i}`` (i from 0), and ``Success``, their mean.

    Args:
        num_envs: B, the number of rows.
        rulesets: `Rulesets`, a size for `generate_rulesets` ("trivial", "small", "medium" or "high"), or the path of an ``.npz``
            file for `load_rulesets`.
        split: "train" or "test"; their tasks are disjoint.
        k_shots: attempts per rollout.
        grid: name of a world of XLand-MiniGrid, with 1 to 9 rooms (R1 to R9) and 9x9 to 25x25 cells.
        shot_length: maximum steps per shot; None means XLand-MiniGrid's, three times the number of cells.
        num_rulesets, ruleset_seed: number of tasks to generate, and the seed of their generation.
        device: "cpu", "gpu" or "tpu"; None leaves the choice to JAX.
        arrays: "numpy", or "jax": actors stay on JAX's device (`amago.envs.builtin.jax_envs.JaxRows`).

    Attributes:
        tasks: the `Rulesets` of this environment.
    """

    def __init__(
        self,
        num_envs: int,
        rulesets: str | Path | Rulesets = "trivial",
        split: str = "train",
        k_shots: int = 3,
        grid: str = "XLand-MiniGrid-R1-9x9",
        shot_length: int | None = None,
        num_rulesets: int = 1000,
        ruleset_seed: int = 0,
        device: str | None = None,
        arrays: str = "numpy",
    ) -> None:
        xminigrid = require("xminigrid", "xland")
        common.check_int("num_envs", num_envs, 1)
        self.k_shots = k = common.check_int("k_shots", k_shots, 1)
        self.tasks, name = _tasks(rulesets, split, num_rulesets, ruleset_seed)
        known = [world for world in xminigrid.registered_environments() if world.startswith("XLand")]
        params = xminigrid.make(common.check_choice("grid", grid, known))[1]
        if shot_length is not None:
            params = params.replace(max_steps=common.check_int("shot_length", shot_length, 1))
        self.shot_length = int(params.max_steps)
        free = (params.height - 2) * (params.width - 2)  # an upper bound: walls between rooms are not subtracted
        if self.tasks.init_tiles.shape[1] + 1 > free * 2 // 3:
            raise ValueError(
                f"grid={grid!r} has too few cells for {self.tasks.init_tiles.shape[1]} objects; choose a larger one"
            )
        self.env_name, self.horizon = f"xland_{name}", k * self.shot_length
        view = params.view_size
        spaces: dict[str, gym.Space[Any]] = {
            "image": gym.spaces.Box(0, 1, shape=(view, view, _TILES + _COLOURS), dtype=np.uint8),
            "pocket": gym.spaces.Box(0, 1, shape=(_TILES + _COLOURS,), dtype=np.uint8),
            "status": gym.spaces.Box(0.0, 1.0, shape=(7,), dtype=np.float32),
        }
        action_space: gym.Space[Any] = gym.spaces.Discrete(_ACTIONS)
        row_functions = _row_functions(grid, self.shot_length, k)
        tables = (self.tasks.goals, self.tasks.rules, self.tasks.init_tiles)
        super().__init__(num_envs, gym.spaces.Dict(spaces), action_space, *row_functions, "xland", device, tables, arrays)


@lru_cache(maxsize=8)
def _row_functions(grid: str, shot_length: int, k: int) -> tuple[Callable[..., RowReset], Callable[..., RowStep]]:
    """The functions that reset and step a row; their tables are the arrays of `Rulesets`."""
    jax = require("jax", "xland")
    jnp, make_ruleset = jax.numpy, require("xminigrid.types", "xland").RuleSet
    env, params = require("xminigrid", "xland").make(grid)
    params = params.replace(max_steps=shot_length)

    def of_task(tables: Tables, task: JaxArray) -> EnvParams:
        goals, rules, tiles = tables
        return params.replace(ruleset=make_ruleset(goal=goals[task], rules=rules[task], init_tiles=tiles[task]))

    def one_hot(tile: JaxArray) -> Any:
        parts = (jax.nn.one_hot(tile[..., 0], _TILES), jax.nn.one_hot(tile[..., 1], _COLOURS))
        return jnp.concatenate(parts, axis=-1).astype(jnp.uint8)

    def observe(step: TimeStep, shot: JaxArray) -> dict[str, JaxArray]:
        agent, taken = step.state.agent, step.state.step_num
        flags = jnp.stack([taken == 0, shot / k, taken / shot_length]).astype(jnp.float32)
        status = jnp.concatenate([jax.nn.one_hot(agent.direction, 4), flags])
        return {"image": one_hot(step.observation), "pocket": one_hot(agent.pocket), "status": status}

    def reset_row(tables: Tables, key: JaxArray) -> RowReset:
        task_key, layout_key = jax.random.split(key)
        task = jax.random.randint(task_key, (), 0, len(tables[0]))
        step, shot = env.reset(of_task(tables, task), layout_key), jnp.int32(0)
        return (step, task, shot, jnp.zeros(k, dtype=bool)), observe(step, shot)

    def step_row(tables: Tables, key: JaxArray, state: tuple[Any, ...], action: JaxArray) -> RowStep:
        before, task, shot, wins = state
        step = env.step(of_task(tables, task), before, action)
        over, won = step.last(), step.last() & (step.discount == 0)
        wins = wins.at[shot].set(won)  # while a shot goes on, its value is False
        done = over & (shot == k - 1)
        task_key, layout_key = jax.random.split(key)
        new_task = jnp.where(done, jax.random.randint(task_key, (), 0, len(tables[0])), task)
        new_shot = jnp.where(done, 0, shot + over)
        new = use_after(jax, over, env.reset(of_task(tables, new_task), layout_key), step)
        logged = {f"{AMAGO_ENV_LOG_PREFIX} Success in Shot {i}": wins[i].astype(jnp.float32) for i in range(k)}
        logged[f"{AMAGO_ENV_LOG_PREFIX} Success"] = wins.mean()
        new_state = (new, new_task, new_shot, wins & ~done)
        return new_state, observe(new, new_shot), step.reward, done, jnp.zeros_like(done), observe(step, shot), logged

    return reset_row, step_row


def _tasks(rulesets: str | Path | Rulesets, split: str, num: int, seed: int) -> tuple[Rulesets, str]:
    if isinstance(rulesets, Rulesets):
        return rulesets.split(split), "own"
    if isinstance(rulesets, Path) or str(rulesets).endswith(".npz"):
        return load_rulesets(rulesets).split(split), Path(rulesets).stem
    try:
        return generate_rulesets(rulesets, num, split, seed), str(rulesets)
    except ValueError as err:
        raise ValueError(f"rulesets={rulesets!r}, num_rulesets={num}, ruleset_seed={seed}: {err}") from err


class XLandMinigridVectorizedGym(XLandMiniGrid):
    """`XLandMiniGrid` with the original's names of arguments; ``options`` are its others."""

    def __init__(self, parallel_envs: int, k_episodes: int = 25, **options: Any) -> None:
        super().__init__(parallel_envs, k_shots=k_episodes, **options)
