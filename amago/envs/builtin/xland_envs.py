"""XLand-MiniGrid: k attempts at tasks with hidden goals and hidden rules (Nikulin et al. 2023, arXiv:2312.12044).

Needs ``pip install 'amago[xland]'``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require
from amago.envs.builtin._jax_vector import JaxVectorEnv, RowReset, RowStep, use_after
from amago.envs.builtin.xland_rulesets import Rulesets, generate_rulesets, load_rulesets
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

_TILES, _COLOURS, _ACTIONS = 13, 12, 6


@gin.configurable(module="amago.envs.builtin")
class XLandMiniGrid(JaxVectorEnv):
    """``num_envs`` worlds (rows), for ``AMAGOEnv(..., batched_envs=num_envs)``; a rollout is k attempts (shots) at one task.

    Each rollout draws a task: a goal, and rules by which objects turn into others (`xland_rulesets`), both hidden. Each shot
    places the objects at random. A shot ends at the goal or after ``shot_length`` steps. The rollout terminates (never
    truncates) with the last shot, and the same step begins the next rollout of that row.

    Reward: ``1 - 0.9 * steps / shot_length`` in the step that reaches the goal, else 0.

    Observation, a Dict: "image", uint8 ``(V, V, 25)``, the agent's field of view as one-hot tiles (13) and colours (12);
    "pocket", uint8 ``(25,)``, the object it carries, in the same encoding; "status", float32 ``(7,)``: its direction (4,
    one-hot), 1 at the first observation of a shot, the fraction of shots that are over, and steps of this shot divided by
    ``shot_length``.

    Actions, ``Discrete(6)``: forward, turn right, turn left, pick up, put down, toggle (a door).

    Metrics at the end of a rollout: ``Success in Shot {i}`` (i from 0), and ``Success``, their mean.

    Args:
        num_envs: B, the number of rows.
        rulesets: "trivial", "small", "medium" or "high", see `xland_rulesets.generate_rulesets`; the path of an ``.npz`` file,
            see `xland_rulesets.load_rulesets`; or `Rulesets`.
        split: "train" or "test"; their tasks are disjoint.
        k_shots: attempts per rollout.
        grid: name of a world of XLand-MiniGrid, with 1 to 9 rooms (R1 to R9) and 9x9 to 25x25 cells.
        shot_length: maximum steps per shot; None means XLand-MiniGrid's, three times the number of cells.
        num_rulesets: number of tasks to generate.
        ruleset_seed: seed of their generation.
        device: "cpu", "gpu" or "tpu"; None leaves the choice to JAX.

    Attributes:
        env_name: "xland_" and the name of the rulesets.
        horizon: maximum steps per rollout.
        tasks: the `Rulesets` of this environment.

    Raises:
        ImportError: JAX or xminigrid is missing.
        TypeError, ValueError: an argument has the wrong type or is out of range.
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
        super().__init__(num_envs, gym.spaces.Dict(spaces), action_space, *row_functions, "xland", device, tables)


@lru_cache(maxsize=8)
def _row_functions(grid: str, shot_length: int, k: int) -> tuple[Callable[..., RowReset], Callable[..., RowStep]]:
    """The functions that reset and step a row; their tables are the arrays of `Rulesets`."""
    jax = require("jax", "xland")
    jnp, make_ruleset = jax.numpy, require("xminigrid.types", "xland").RuleSet
    env, params = require("xminigrid", "xland").make(grid)
    params = params.replace(max_steps=shot_length)

    def of_task(tables: Any, task: Any) -> Any:
        goals, rules, tiles = tables
        return params.replace(ruleset=make_ruleset(goal=goals[task], rules=rules[task], init_tiles=tiles[task]))

    def one_hot(tile: Any) -> Any:
        parts = (jax.nn.one_hot(tile[..., 0], _TILES), jax.nn.one_hot(tile[..., 1], _COLOURS))
        return jnp.concatenate(parts, axis=-1).astype(jnp.uint8)

    def shown(step: Any, shot: Any) -> Any:
        agent, taken = step.state.agent, step.state.step_num
        flags = jnp.stack([taken == 0, shot / k, taken / shot_length]).astype(jnp.float32)
        status = jnp.concatenate([jax.nn.one_hot(agent.direction, 4), flags])
        return {"image": one_hot(step.observation), "pocket": one_hot(agent.pocket), "status": status}

    def reset_row(tables: Any, key: Any) -> RowReset:
        task_key, layout_key = jax.random.split(key)
        task = jax.random.randint(task_key, (), 0, len(tables[0]))
        step, shot = env.reset(of_task(tables, task), layout_key), jnp.int32(0)
        return (step, task, shot, jnp.zeros(k, dtype=bool)), shown(step, shot)

    def step_row(tables: Any, key: Any, state: Any, action: Any) -> RowStep:
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
        return new_state, shown(new, new_shot), step.reward, done, jnp.zeros_like(done), shown(step, shot), logged

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


__all__ = ["XLandMiniGrid"]
