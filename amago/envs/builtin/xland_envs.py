"""XLand-MiniGrid: find out in k shots how a small world works (Nikulin et al. 2023, arXiv:2312.12044).

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
from amago.envs.builtin._jax_vector import Advanced, JaxVectorEnv, Opened, use_after
from amago.envs.builtin.xland_rulesets import Rulesets, generate_rulesets, load_rulesets
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

_TILES, _COLOURS, _ACTIONS = 13, 12, 6


@gin.configurable(module="amago.envs.builtin")
class XLandMiniGrid(JaxVectorEnv):
    """``num_envs`` worlds, for ``AMAGOEnv(..., batched_envs=num_envs)``; a rollout is ``k_shots`` attempts at one hidden task.

    Each rollout draws a goal and the rules by which objects become others (`xland_rulesets`); neither is shown. Each shot
    scatters the objects anew. A shot ends when the goal is reached, with ``1 - 0.9 * steps / shot_length`` as its reward, or
    after ``shot_length`` steps; the step that ends a rollout opens the next, and terminates.

    Observation, a Dict: "image", uint8 ``(V, V, 25)``, what the agent sees of the grid, one-hot tile (13) and colour (12);
    "pocket", uint8 ``(25,)``, what it carries, likewise; "status", float32 ``(7,)``: its direction, one-hot (4), 1 where a shot
    opens, the share of the shots that are over, and the share of this shot's steps.

    Actions, ``Discrete(6)``: forward, turn right, turn left, pick up, put down, toggle (a door).

    Logged when a rollout ends: ``Success in Shot {i}`` from 0, and ``Success``, their mean.

    Args:
        num_envs: B, the rows.
        rulesets: "trivial", "small", "medium" or "high", to be drawn here; an ``.npz`` of your own; or `Rulesets`.
        split: "train" or "test": no task is in both.
        k_shots: attempts at a task.
        grid: name of the world in XLand-MiniGrid: R1 to R9 rooms, 9x9 to 25x25.
        shot_length: steps of an attempt; None takes XLand-MiniGrid's, three times the number of cells.
        num_rulesets: how many tasks to draw.
        ruleset_seed: of that draw.
        device: where jax computes: "cpu", "gpu", "tpu"; None takes its own choice.

    Attributes:
        env_name: "xland_" and the name of the rulesets.
        horizon: the most steps in a rollout.
        tasks: the `Rulesets` in use.

    Raises:
        ImportError: jax or xminigrid is missing.
        TypeError, ValueError: an argument is wrong; the message quotes it.
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
        if grid not in known:
            raise ValueError(f"grid must be one of {', '.join(known)}, got {grid!r}")
        params = xminigrid.make(grid)[1]
        if shot_length is not None:
            params = params.replace(max_steps=common.check_int("shot_length", shot_length, 1))
        self.shot_length = int(params.max_steps)
        free = (params.height - 2) * (params.width - 2)  # walls between rooms take more
        if self.tasks.init_tiles.shape[1] + 1 > free * 2 // 3:
            raise ValueError(f"grid {grid!r} has too few cells for {self.tasks.init_tiles.shape[1]} objects; take a larger one")
        self.env_name, self.horizon = f"xland_{name}", k * self.shot_length
        view = params.view_size
        spaces: dict[str, gym.Space[Any]] = {
            "image": gym.spaces.Box(0, 1, shape=(view, view, _TILES + _COLOURS), dtype=np.uint8),
            "pocket": gym.spaces.Box(0, 1, shape=(_TILES + _COLOURS,), dtype=np.uint8),
            "status": gym.spaces.Box(0.0, 1.0, shape=(7,), dtype=np.float32),
        }
        action_space: gym.Space[Any] = gym.spaces.Discrete(_ACTIONS)
        rows = _rows(grid, self.shot_length, k)
        tables = (self.tasks.goals, self.tasks.rules, self.tasks.init_tiles)
        super().__init__(num_envs, gym.spaces.Dict(spaces), action_space, *rows, "xland", device, tables)


@lru_cache(maxsize=8)
def _rows(grid: str, shot_length: int, k: int) -> tuple[Callable[..., Opened], Callable[..., Advanced]]:
    """What opens one row and what advances it; the tables are those of `Rulesets`."""
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

    def open_row(tables: Any, key: Any) -> Opened:
        task_key, layout_key = jax.random.split(key)
        task = jax.random.randint(task_key, (), 0, len(tables[0]))
        step, shot = env.reset(of_task(tables, task), layout_key), jnp.int32(0)
        return (step, task, shot, jnp.zeros(k, dtype=bool)), shown(step, shot)

    def advance_row(tables: Any, key: Any, state: Any, action: Any) -> Advanced:
        before, task, shot, wins = state
        step = env.step(of_task(tables, task), before, action)
        over, won = step.last(), step.last() & (step.discount == 0)
        wins = wins.at[shot].set(won)  # of a shot that goes on, written over later
        done = over & (shot == k - 1)
        task_key, layout_key = jax.random.split(key)
        new_task = jnp.where(done, jax.random.randint(task_key, (), 0, len(tables[0])), task)
        new_shot = jnp.where(done, 0, shot + over)
        new = use_after(jax, over, env.reset(of_task(tables, new_task), layout_key), step)
        logged = {f"{AMAGO_ENV_LOG_PREFIX} Success in Shot {i}": wins[i].astype(jnp.float32) for i in range(k)}
        logged[f"{AMAGO_ENV_LOG_PREFIX} Success"] = wins.mean()
        new_state = (new, new_task, new_shot, wins & ~done)
        return new_state, shown(new, new_shot), step.reward, done, jnp.zeros_like(done), shown(step, shot), logged

    return open_row, advance_row


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
