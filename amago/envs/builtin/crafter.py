"""Crafter with instructions: reach a sequence of goals in an open world (Hafner 2021, arXiv:2109.06780; AMAGO,
arXiv:2310.09971).

Needs ``pip install 'amago[crafter]'``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.registry import require
from amago.relabeling import GoalSequenceRelabeler

if TYPE_CHECKING:
    from crafter.engine import LocalView
    from crafter.objects import Player

Observation = dict[str, NDArray[Any]]

OBS_KINDS = ("render", "crop", "local")
ACHIEVEMENTS = (
    "collect_coal", "collect_diamond", "collect_drink", "collect_iron", "collect_sapling", "collect_stone", "collect_wood",
    "defeat_skeleton", "defeat_zombie", "eat_cow", "eat_plant", "make_iron_pickaxe", "make_iron_sword", "make_stone_pickaxe",
    "make_stone_sword", "make_wood_pickaxe", "make_wood_sword", "place_furnace", "place_plant", "place_stone", "place_table",
    "wake_up",
)  # fmt: skip
TRAVEL = "travel"
INSTRUCTIONS = (*ACHIEVEMENTS, TRAVEL)
"""The kinds of goals; "travel" stands for the 64 goals "travel_0_0" to "travel_7_7"."""

AREA = 8
"""Side length in cells of the areas to travel to; the world has 8 x 8 of them."""
WORLD = 64
_ROW = WORLD // AREA

GOAL_WORDS = (
    "", *sorted({word for name in ACHIEVEMENTS for word in name.split("_")}), TRAVEL,
    *(f"x{i}" for i in range(_ROW)), *(f"y{i}" for i in range(_ROW)),
)  # fmt: skip
"""The vocabulary of goals. The empty word is padding; a goal that has been reached consists of it alone."""
_WORD = {word: i for i, word in enumerate(GOAL_WORDS)}
GOAL_LENGTH = 3

MATERIALS = ("water", "grass", "stone", "path", "sand", "tree", "lava", "coal", "iron", "diamond", "table", "furnace")
CREATURES = ("Cow", "Zombie", "Skeleton", "Arrow", "Plant", "ripe Plant")
CHANNELS = ("outside", *MATERIALS, *CREATURES)
"""The one-hot channels of a cell with ``obs_kind="local"``."""
_VIEW = (9, 7)
_UNIT = 7  # pixels per cell in an image of 64 x 64
_FACING = ((-1, 0), (1, 0), (0, -1), (0, 1))


def goal_tokens(goal: str) -> NDArray[np.uint8]:
    """The words of a goal such as "collect_wood" or "travel_3_5" (column and row of an area) as indices into `GOAL_WORDS`, uint8 (3,)."""
    words = str(goal).split("_")
    if words[0] == TRAVEL and len(words) == 3:
        words = [TRAVEL, f"x{words[1]}", f"y{words[2]}"]
    if (goal not in ACHIEVEMENTS and words[0] != TRAVEL) or len(words) > GOAL_LENGTH or any(w not in _WORD for w in words):
        near = common.similar(str(goal), ACHIEVEMENTS)
        raise ValueError(f"goals has {goal!r}, but Crafter has travel_X_Y (X and Y from 0 to {_ROW - 1}), {near}")
    if goal == TRAVEL:
        raise ValueError(f"goals has {goal!r} without an area: write travel_X_Y with X and Y from 0 to {_ROW - 1}")
    out = np.zeros(GOAL_LENGTH, dtype=np.uint8)
    out[: len(words)] = [_WORD[w] for w in words]
    return out


_TOKENS = {name: goal_tokens(name) for name in ACHIEVEMENTS}


class OrderedSet(dict[Any, None]):
    """A set that iterates in order of insertion, in which Crafter's worlds depend on their seed alone, not on memory addresses."""

    def add(self, element: object) -> None:
        self[element] = None

    def remove(self, element: object) -> None:
        del self[element]


class FastLocalView:
    """Draw the cells around the player as the `crafter.engine.LocalView` ``view`` does, which still draws night and sleep."""

    def __init__(self, view: LocalView) -> None:
        self._view, self._world, self._textures = view, view._world, view._textures
        self._engine = require("crafter.engine", "crafter")
        self._size = (int(view._grid[0]), int(view._grid[1]))
        self._tiles: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def _tiles_of(self, unit: tuple[int, int]) -> NDArray[np.uint8]:
        """Images of all materials, uint8 (materials, *unit, 3); index 0, outside the world, is grey."""
        if unit not in self._tiles:
            names = self._world._mat_names
            tiles = np.full((len(names), *unit, 3), 127, dtype=np.uint8)
            for i, name in names.items():
                if name is not None:
                    tiles[i] = self._textures.get(name, unit)[..., :3]
            self._tiles[unit] = tiles
        return self._tiles[unit]

    def __call__(self, player: Player, unit: Sequence[int]) -> NDArray[Any]:
        (width, height), side = self._size, (int(unit[0]), int(unit[1]))
        materials = around(self._world._mat_map, player.pos, self._size)
        canvas = self._tiles_of(side)[materials].transpose(0, 2, 1, 3, 4).reshape(width * side[0], height * side[1], 3)
        creatures = around(self._world._obj_map, player.pos, self._size)
        for x, y in np.argwhere(creatures).tolist():
            texture = self._textures.get(self._world._objects[creatures[x, y]].texture, unit)
            self._engine._draw_alpha(canvas, np.array([x, y]) * unit, texture)
        canvas = self._view._light(canvas, self._world.daylight)
        return self._view._sleep(canvas) if player.sleeping else canvas  # type: ignore[no-any-return]


def around(cells: NDArray[Any], center: Sequence[int], size: tuple[int, int]) -> NDArray[Any]:
    """The section of a map [x, y] that has ``center`` at ``size // 2``; cells outside the map are 0."""
    out = np.zeros(size, dtype=cells.dtype)
    left, top = int(center[0]) - size[0] // 2, int(center[1]) - size[1] // 2
    x0, y0 = max(0, left), max(0, top)
    part = cells[x0 : left + size[0], y0 : top + size[1]]
    out[x0 - left : x0 - left + part.shape[0], y0 - top : y0 - top + part.shape[1]] = part
    return out


@gin.configurable(module="amago.envs.builtin")
class CrafterInstructions(gym.Env[Observation, np.int64]):
    """Crafter with a sequence of goals to reach in order.

    Each `reset` draws a world and k goals, k uniform in ``min_goals`` to ``max_goals``: each goal is uniform in
    ``instructions``, and the area of "travel" is uniform, too. After each step the current goal is compared with what was
    achieved in that step: an achievement of Crafter (each repetition counts; waking up takes precedence over others), or else
    the area in which the player stands. A step reaches at most one goal. The rollout terminates (never truncates, because the
    clock is observed) with the last goal, with the player's death, or after ``time_limit`` steps.

    Reward: 1 in a step that reaches a goal, else 0; Crafter's own rewards are dropped.

    Actions, ``Discrete(17)``: Crafter's.

    Observation, a Dict:

    - "observation", uint8, according to ``obs_kind``: "render" ``(64, 64, 3)``, Crafter's image; "crop" ``(49, 63, 3)``, that
      image without the inventory; "local" ``(9, 7, 19)``, the cells of "crop" indexed [x, y, channel of `CHANNELS`]. Images are
      dark at night, cells are not;
    - "status", float32 ``(25,)``: inventory / 9 (16), whether the player sleeps, daylight, the player's direction (4, one-hot),
      x / 64, y / 64, and steps / ``time_limit``;
    - "goals", uint8 ``(max_goals, 3)``: the goals in order as indices into `GOAL_WORDS`, 0 once reached. With fewer than
      ``max_goals`` goals the first rows are 0;
    - "achieved", uint8 ``(3,)``: achievement of this step in the form of a goal, for `InstructionRelabeler`; 0 if it is in
      neither ``instructions`` nor ``goals``.

    Metrics at the end of a rollout: ``Goals Reached`` (a fraction of k), ``Success`` (1 if all were reached), ``Achievements``
    (the number of Crafter's 22 that were unlocked) and ``Died``.

    A seed and the same actions give the same rollout, unlike in Crafter itself. Images at night contain noise from the world's
    random generator, so that worlds evolve differently from those with ``obs_kind="local"``.

    Args:
        instructions: the kinds of goals to draw from; None means all of `INSTRUCTIONS`.
        min_goals, max_goals: bounds of the number of goals per rollout.
        goals: fixed goals of every rollout, such as ["collect_wood", "place_table"], at most ``max_goals``, which then only
            determines the observation space.
        obs_kind: "render", "crop" or "local".
        time_limit: maximum steps per rollout.
        render_mode: None or "rgb_array", 288 x 288 pixels.

    Attributes:
        rollout_goals: all goals of this rollout in order, including those already reached.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        instructions: Sequence[str] | None = None,
        min_goals: int = 1,
        max_goals: int = 5,
        goals: Sequence[str] | None = None,
        obs_kind: str = "local",
        time_limit: int = 2000,
        render_mode: str | None = None,
    ) -> None:
        self.obs_kind = common.check_choice("obs_kind", obs_kind, OBS_KINDS)
        names = INSTRUCTIONS if instructions is None else instructions
        self.instructions = common.check_names("instructions", names, _check_instruction)
        self.min_goals = common.check_int("min_goals", min_goals, 1)
        self.max_goals = common.check_int("max_goals", max_goals, 1)
        if self.min_goals > self.max_goals:
            raise ValueError(f"min_goals must be at most max_goals={max_goals!r}, got {min_goals!r}")
        self.goals = None if goals is None else _check_goals(goals, self.max_goals)
        self.time_limit = self.horizon = common.check_int("time_limit", time_limit, 1)
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        self.env_name = "crafter" if self.goals is None else f"crafter_{'+'.join(self.goals)}"

        crafter = require("crafter", "crafter")
        self._objects, self._worldgen = require("crafter.objects", "crafter"), require("crafter.worldgen", "crafter")
        self._env = crafter.Env(size=(64, 64), length=None, seed=0)
        self._env._sem_view = self._env._obs = lambda: None  # drawing takes longer than the rest of a step
        self._env._local_view = FastLocalView(self._env._local_view)
        creatures = [vars(self._objects)[name] for name in CREATURES[:-1]]
        self._kind = {cls: 1 + len(MATERIALS) + i for i, cls in enumerate(creatures)}
        box = gym.spaces.Box
        shape, high = {"render": ((64, 64, 3), 255), "crop": ((49, 63, 3), 255), "local": ((*_VIEW, len(CHANNELS)), 1)}[
            obs_kind
        ]
        last = len(GOAL_WORDS) - 1
        self.observation_space = gym.spaces.Dict(
            {
                "observation": box(0, high, shape, np.uint8),
                "status": box(0.0, 1.0, (25,), np.float32),
                "goals": box(0, last, (self.max_goals, GOAL_LENGTH), np.uint8),
                "achieved": box(0, last, (GOAL_LENGTH,), np.uint8),
            }
        )
        self.action_space = gym.spaces.Discrete(17)
        self.rollout_goals: list[str] = []
        self._goal_rows = np.zeros((self.max_goals, GOAL_LENGTH), dtype=np.uint8)
        self._counted: dict[str, int] = {}
        self._clock, self._over, self._reached = 0, True, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._begin(int(self.np_random.integers(2**31 - 1)))
        goals = self.rollout_goals = self._draw() if self.goals is None else list(self.goals)
        self._goal_rows = np.zeros((self.max_goals, GOAL_LENGTH), dtype=np.uint8)
        self._goal_rows[self.max_goals - len(goals) :] = [goal_tokens(goal) for goal in goals]
        wanted = {*self.instructions, *(TRAVEL if goal.startswith(TRAVEL) else goal for goal in goals)}
        self._watched, self._travels = [name for name in ACHIEVEMENTS if name in wanted], TRAVEL in wanted
        self._counted = dict(self._env._player.achievements)
        self._clock, self._over, self._reached = 0, False, 0
        return self._observe(self._achieved()), {}

    def _begin(self, seed: int) -> None:
        """Reset Crafter as `crafter.Env.reset` does, but with the given seed for the world."""
        env = self._env
        env._episode, env._step, env._unlocked = env._episode + 1, 0, set()
        env._world.reset(seed=seed)
        env._world._chunks = defaultdict(OrderedSet)
        env._update_time()
        env._player = self._objects.Player(env._world, (WORLD // 2, WORLD // 2))
        env._last_health = env._player.health
        env._world.add(env._player)
        self._worldgen.generate_world(env._world, env._player)

    def _draw(self) -> list[str]:
        rng = self.np_random
        out = []
        for _ in range(int(rng.integers(self.min_goals, self.max_goals + 1))):
            name = self.instructions[int(rng.integers(len(self.instructions)))]
            out.append(f"{TRAVEL}_{rng.integers(_ROW)}_{rng.integers(_ROW)}" if name == TRAVEL else name)
        return out

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._over:
            common.refuse_step("CrafterInstructions")
        self._env.step(common.check_action(action, 17))
        dead = self._env._player.health <= 0
        self._clock += 1
        achieved = self._achieved()
        reward, k = 0.0, len(self.rollout_goals)
        due = self._goal_rows[self.max_goals - k + self._reached]
        if (achieved == due).all():
            due[:] = 0
            self._reached += 1
            reward = 1.0
        self._over = dead or self._reached == k or self._clock >= self.time_limit
        ended = {"Goals Reached": self._reached / k, "Success": float(self._reached == k), "Died": float(dead)}
        ended["Achievements"] = float(len(self._env._unlocked))
        return self._observe(achieved), reward, self._over, False, common.metrics(ended) if self._over else {}

    def _achieved(self) -> NDArray[np.uint8]:
        counts, before = self._env._player.achievements, self._counted
        done = [name for name in self._watched if counts[name] > before[name]]
        if counts != before:
            self._counted = dict(counts)
        if done:
            return _TOKENS[done[-1]].copy()  # only waking up can coincide with another, and it is the last in the list
        if not self._travels:
            return np.zeros(GOAL_LENGTH, dtype=np.uint8)
        x, y = self._env._player.pos
        return np.array([_WORD[TRAVEL], _WORD[f"x{x // AREA}"], _WORD[f"y{y // AREA}"]], dtype=np.uint8)

    def _observe(self, achieved: NDArray[np.uint8]) -> Observation:
        player, status = self._env._player, np.zeros(25, dtype=np.float32)
        status[:16] = [amount / 9 for amount in player.inventory.values()]
        status[16:18] = player.sleeping, self._env._world.daylight
        status[18 + _FACING.index(tuple(player.facing))] = 1.0
        status[22:] = player.pos[0] / WORLD, player.pos[1] / WORLD, self._clock / self.time_limit
        return {"observation": self._view(), "status": status, "goals": self._goal_rows.copy(), "achieved": achieved}

    def _view(self) -> NDArray[np.uint8]:
        env = self._env
        if self.obs_kind == "render":
            return env.render()  # type: ignore[no-any-return]
        if self.obs_kind == "crop":
            picture = env._local_view(env._player, np.array([_UNIT, _UNIT]))
            return np.ascontiguousarray(picture.transpose(1, 0, 2).astype(np.uint8))
        world, pos = env._world, env._player.pos
        out = np.zeros((*_VIEW, len(CHANNELS)), dtype=np.uint8)
        materials = around(world._mat_map, pos, _VIEW)
        np.put_along_axis(out, materials[..., None].astype(np.intp), 1, axis=-1)
        there = around(world._obj_map, pos, _VIEW)
        for x, y in np.argwhere(there).tolist():
            creature = world._objects[there[x, y]]
            channel = self._kind.get(type(creature))
            if channel is not None:
                out[x, y, channel + (isinstance(creature, self._objects.Plant) and creature.ripe)] = 1
        return out

    def render(self) -> Any:
        """Crafter's image, uint8 (288, 288, 3). Rendering does not affect the rollout."""
        if self.render_mode is None or self._env._player is None:
            return None
        random = self._env._world.random
        state = random.get_state()  # the noise of night is drawn from the world's generator
        frame = self._env.render((288, 288))
        random.set_state(state)
        return frame


def _check_instruction(name: str) -> str:
    if name not in INSTRUCTIONS:
        raise ValueError(f"instructions has {name!r}, but Crafter has {common.similar(str(name), INSTRUCTIONS)}")
    return name


def _check_goals(goals: Sequence[str], most: int) -> tuple[str, ...]:
    if isinstance(goals, str):
        raise TypeError(f"goals must be a list of names, got {goals!r}")
    for goal in goals:
        goal_tokens(goal)
    if not 1 <= len(goals) <= most:
        raise ValueError(f"goals must name 1 to max_goals={most} goals, got {list(goals)!r}")
    return tuple(goals)


@gin.configurable(module="amago.envs.builtin")
class InstructionRelabeler(GoalSequenceRelabeler):
    """`GoalSequenceRelabeler` for Crafter, in which rare achievements are as likely to become goals as frequent ones.

    New goals are drawn uniformly over the distinct achievements of the rollout, whatever their frequency. All travel goals
    count as one achievement; steps without an achievement are left out.

    Args:
        strategy: "none", "some" or "all" of the missed goals are replaced.
    """

    def __init__(self, strategy: str = "some") -> None:
        super().__init__(strategy, goal_key="goals", achieved_key="achieved", done_value=0)

    def choose_times(self, achieved: NDArray[Any], free: NDArray[Any], n: int, rng: np.random.Generator) -> NDArray[Any]:
        free = free[achieved[free].any(axis=-1)]
        if n == 0 or not free.size:
            return free[:0]
        kinds = achieved[free].copy()
        kinds[kinds[:, 0] == _WORD[TRAVEL], 1:] = 0
        _, which, counts = np.unique(kinds, axis=0, return_inverse=True, return_counts=True)
        weights = 1 / counts[which.reshape(-1)]
        return rng.choice(free, size=min(n, len(free)), replace=False, p=weights / weights.sum())
