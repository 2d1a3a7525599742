"""Symbolic Alchemy: learn by experiment how potions change stones, then exploit it (Wang et al. 2021, arXiv:2102.02926)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common

STONES = 3
POTIONS = 12
COLOURS = 6
"""Colours 0 and 1 are opposites, and so are 2 and 3, and 4 and 5, in every chemistry."""
CORNERS = 8
VALUES: tuple[int, ...] = tuple((-3, -1, 1, 15)[corner.bit_count()] for corner in range(CORNERS))
"""The value of the stone at each corner."""
GOAL = CORNERS - 1

Table = tuple[tuple[int, ...], ...]
"""``table[corner][potion]`` is the corner after the potion. Potion 2 * i clears bit i, potion 2 * i + 1 sets it."""


@dataclass(frozen=True)
class Graph:
    """A cube without some of its edges.

    Attributes:
        constraints: for each bit, the (other bit, value) pairs that are necessary for that bit to change.
        table: the effect of each potion on a stone at each corner.
        bottlenecks: the number of constraints, 0 to 3.
    """

    constraints: tuple[tuple[tuple[int, int], ...], ...]
    table: Table

    @property
    def bottlenecks(self) -> int:
        return sum(map(len, self.constraints))


@cache
def graphs() -> tuple[Graph, ...]:
    """All 109 graphs in which every corner can be reached from every other."""
    choices = []
    for bit in range(3):
        a, b = (other for other in range(3) if other != bit)
        choices.append(
            [
                tuple((other, value) for other, value in ((a, x), (b, y)) if value is not None)
                for x in (None, 0, 1)
                for y in (None, 0, 1)
            ]
        )
    made = (Graph(constraints, _table(constraints)) for constraints in itertools.product(*choices))
    return tuple(graph for graph in made if _is_connected(graph.table))


def _table(constraints: tuple[tuple[tuple[int, int], ...], ...]) -> Table:
    rows = []
    for corner in range(CORNERS):
        row = []
        for bit, needed in enumerate(constraints):
            works = all((corner >> other) & 1 == value for other, value in needed)
            row += [corner & ~(1 << bit), corner | 1 << bit] if works else [corner, corner]
        rows.append(tuple(row))
    return tuple(rows)


def _is_connected(table: Table) -> bool:
    reached = {0}
    for _ in range(CORNERS):
        reached = reached.union(*(table[corner] for corner in reached))
    return len(reached) == CORNERS


@cache
def graphs_by_bottlenecks() -> tuple[tuple[int, ...], ...]:
    """Indices of the graphs with 0, 1, 2 and 3 bottlenecks."""
    return tuple(tuple(i for i, graph in enumerate(graphs()) if graph.bottlenecks == n) for n in range(4))


@cache
def colour_meanings() -> tuple[tuple[int, ...], ...]:
    """All 48 assignments: ``colour_meanings()[i][colour]`` is a potion; opposite colours change the same bit."""
    out = []
    for bits in itertools.permutations(range(3)):
        for flips in itertools.product((0, 1), repeat=3):
            out.append(tuple(2 * bits[c // 2] + (c % 2 ^ flips[c // 2]) for c in range(COLOURS)))
    return tuple(out)


@cache
def appearances() -> tuple[NDArray[np.float32], ...]:
    """All 32 appearances of the eight corners, float32 (8, 3) each: size, colour and roundness in {-1, 0, 1}.

    They are the eight reflections of the cube, each without rotation or rotated by 45 degrees around one of three axes. In a
    rotated cube two of the features have three values and do not correspond to single bits.
    """
    corners = np.array([[1 if corner >> bit & 1 else -1 for bit in range(3)] for corner in range(CORNERS)])
    out = []
    for signs in itertools.product((1, -1), repeat=3):
        cube = corners * np.array(signs)
        for axis in (None, 0, 1, 2):
            look = cube.astype(np.float32)
            if axis is not None:
                a, b = (other for other in range(3) if other != axis)
                look[:, a], look[:, b] = (cube[:, a] - cube[:, b]) / 2, (cube[:, a] + cube[:, b]) / 2
            look.flags.writeable = False
            out.append(look)
    return tuple(out)


@dataclass(frozen=True)
class Chemistry:
    """The rules that all trials of a rollout share: indices into `graphs`, `colour_meanings` and `appearances`.

    ``effects[corner][colour]`` is the corner after a potion of that colour.
    """

    graph: int
    meaning: int
    appearance: int
    effects: Table

    @staticmethod
    def of(graph: int, meaning: int, appearance: int) -> Chemistry:
        """The chemistry with these three indices."""
        table, potions = graphs()[graph].table, colour_meanings()[meaning]
        effects = tuple(tuple(row[p] for p in potions) for row in table)
        return Chemistry(graph, meaning, appearance, effects)

    @staticmethod
    def random(rng: np.random.Generator) -> Chemistry:
        """A number of bottlenecks uniform in 0 to 3, then a uniform graph with that number; the rest is uniform."""
        alike = graphs_by_bottlenecks()[int(rng.integers(4))]
        graph = alike[int(rng.integers(len(alike)))]
        return Chemistry.of(graph, int(rng.integers(len(colour_meanings()))), int(rng.integers(len(appearances()))))


Observation = NDArray[np.float32]

CAULDRON = 0
"""The target of an action that puts a stone into the cauldron; targets 1 to 12 are potions."""
_TARGETS = 1 + POTIONS
_ACTIONS = 1 + STONES * _TARGETS
_STONE_SIZE, _POTION_SIZE = 5, 2
_FIRST_POTION = STONES * _STONE_SIZE
_OBS_SIZE = _FIRST_POTION + POTIONS * _POTION_SIZE

_USED_STONE = np.array([0, 0, 0, 0, 1], dtype=np.float32)
_COLOUR_ROWS = np.zeros((COLOURS, _POTION_SIZE), dtype=np.float32)
_COLOUR_ROWS[:, 0] = np.linspace(-1, 1, COLOURS)
_SHOWN_VALUE = {-3: -1.0, -1: -1 / 3, 1: 1 / 3, 15: 1.0}
_GAINS = tuple(float(value) for value in VALUES)

_DRAWN: dict[str, common.Colour] = {
    " ": (245, 248, 250), "0": (70, 60, 120), "1": (150, 140, 190), "2": (215, 205, 240), "3": (214, 158, 46),  # stones by bits of value
    "a": (40, 110, 70), "b": (120, 200, 140), "c": (160, 40, 40), "d": (240, 130, 120), "e": (40, 70, 150), "f": (120, 170, 240),
}  # fmt: skip


def action_for(stone: int, target: int) -> int:
    """The action that puts ``stone`` (0 to 2) into the cauldron (target `CAULDRON`) or into potion ``target - 1``."""
    return 1 + stone * _TARGETS + target


@gin.configurable(module="amago.envs.builtin")
class SymbolicAlchemy(gym.Env[Observation, np.int64]):
    """Trials with one hidden chemistry: dip stones into potions to raise their value, then put them into the cauldron.

    A trial has 3 stones and 12 potions, drawn uniformly and independently. A stone is a corner of a hidden cube, with the value
    -3, -1, 1 or 15 if 0, 1, 2 or 3 of its bits are set. A potion moves it along one edge: six colours form three pairs, each of
    which sets and clears one bit. The `Chemistry` determines the bit and direction of each colour, which edges of the cube exist
    (0 to 3 bottlenecks), and the appearance of the corners. It is drawn for each rollout and is the same in all of its trials.

    Actions, ``Discrete(40)``: 0 does nothing; ``1 + 13 * stone + target`` puts a stone into the cauldron (target 0) or into
    potion ``target - 1``. A potion is used up even if it has no effect, and a stone is used up by the cauldron. Actions on a
    used stone or potion do nothing. The last step of a trial returns the first observation of the next trial. The rollout
    terminates (never truncates) with the last trial.

    Observation, float32 ``(39,)`` in [-1, 1]. Five numbers for each stone: size, colour and roundness (-1, 0 or 1), the value
    (-1, -1/3, 1/3 or 1 for -3, -1, 1 or 15), and 0; or ``0, 0, 0, 0, 1`` if it is used. Two numbers for each potion: its colour
    (-1, -0.6, -0.2, 0.2, 0.6 or 1, of which the first two, the next two and the last two are opposites) and 0; or ``0, 1`` if
    it is used.

    Reward: the value of a stone put into the cauldron.

    Metrics: ``Trial {i} Return`` (i from 0) at the end of a trial; ``Best Stones`` (of value 15), ``Stones In Cauldron`` and
    ``Potions Used``, counted over all trials, at the end of the rollout.

    Args:
        num_trials: trials per rollout.
        steps_per_trial: steps per trial.
        render_mode: None or "rgb_array" (uint8 (72, 144, 3)).

    Attributes:
        chemistry: the hidden `Chemistry` of this rollout.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, num_trials: int = 10, steps_per_trial: int = 20, render_mode: str | None = None) -> None:
        self.num_trials = common.check_int("num_trials", num_trials, 1)
        self.steps_per_trial = common.check_int("steps_per_trial", steps_per_trial, 1)
        self.horizon = self.num_trials * self.steps_per_trial
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (_OBS_SIZE,), np.float32)
        self.action_space = gym.spaces.Discrete(_ACTIONS)
        self.chemistry = Chemistry.of(0, 0, 0)
        self._stone_rows = np.zeros((CORNERS, _STONE_SIZE), dtype=np.float32)
        self._obs = np.zeros(_OBS_SIZE, dtype=np.float32)
        self._stones: list[int] = [-1] * STONES  # corners; -1: used
        self._potions: list[int] = [-1] * POTIONS  # colours; -1: used
        self._clock = self.horizon
        self._trial_return = 0.0
        self._best = self._paid = self._potions_used = 0.0

    @property
    def stones(self) -> tuple[int | None, ...]:
        """The corner of each stone of this trial, None if it is used."""
        return tuple(None if corner < 0 else corner for corner in self._stones)

    @property
    def potions(self) -> tuple[int | None, ...]:
        """The colour of each potion of this trial, 0 to 5, or None if it is used."""
        return tuple(None if colour < 0 else colour for colour in self._potions)

    @property
    def trial(self) -> int:
        """Index of this trial, from 0; ``num_trials`` after the end."""
        return self._clock // self.steps_per_trial

    @property
    def steps_left(self) -> int:
        """Remaining steps of this trial; 0 after the end of the rollout."""
        return 0 if self._clock >= self.horizon else self.steps_per_trial - self._clock % self.steps_per_trial

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.chemistry = Chemistry.random(self.np_random)
        self._stone_rows = np.zeros((CORNERS, _STONE_SIZE), dtype=np.float32)
        self._stone_rows[:, :3] = appearances()[self.chemistry.appearance]
        self._stone_rows[:, 3] = [_SHOWN_VALUE[value] for value in VALUES]
        self._clock, self._best, self._paid, self._potions_used = 0, 0.0, 0.0, 0.0
        self._begin_trial()
        return self._obs.copy(), {}

    def _begin_trial(self) -> None:
        rng, obs = self.np_random, self._obs
        corners, colours = rng.integers(CORNERS, size=STONES), rng.integers(COLOURS, size=POTIONS)
        self._stones, self._potions = corners.tolist(), colours.tolist()
        obs[:_FIRST_POTION] = self._stone_rows[corners].reshape(-1)
        obs[_FIRST_POTION:] = _COLOUR_ROWS[colours].reshape(-1)
        self._trial_return = 0.0

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._clock >= self.horizon:
            common.refuse_step("SymbolicAlchemy")
        action = common.check_action(action, _ACTIONS)
        reward = 0.0
        if action:
            stone, target = divmod(action - 1, _TARGETS)
            corner = self._stones[stone]
            if corner >= 0:
                if target == CAULDRON:
                    reward = self._pay(stone, corner)
                else:
                    self._dip(stone, corner, target - 1)
        self._clock += 1
        if self._clock % self.steps_per_trial:
            return self._obs.copy(), reward, False, False, {}
        info = common.metrics({f"Trial {self.trial - 1} Return": self._trial_return})
        if self._clock < self.horizon:
            self._begin_trial()
            return self._obs.copy(), reward, False, False, info
        info |= common.metrics(
            {"Best Stones": self._best, "Stones In Cauldron": self._paid, "Potions Used": self._potions_used}
        )
        return self._obs.copy(), reward, True, False, info

    def _pay(self, stone: int, corner: int) -> float:
        self._stones[stone] = -1
        self._obs[stone * _STONE_SIZE : (stone + 1) * _STONE_SIZE] = _USED_STONE
        self._paid += 1
        self._best += corner == GOAL
        self._trial_return += _GAINS[corner]
        return _GAINS[corner]

    def _dip(self, stone: int, corner: int, potion: int) -> None:
        colour = self._potions[potion]
        if colour < 0:
            return
        self._potions[potion] = -1
        self._potions_used += 1
        place = _FIRST_POTION + potion * _POTION_SIZE
        self._obs[place], self._obs[place + 1] = 0.0, 1.0
        after = self.chemistry.effects[corner][colour]
        if after != corner:
            self._stones[stone] = after
            self._obs[stone * _STONE_SIZE : (stone + 1) * _STONE_SIZE] = self._stone_rows[after]

    def render(self) -> Any:
        """The stones of this trial by their value, the best in gold, above the potions in their colours, opposites dark and light; used
        ones are gone.
        """
        return common.render(self.render_mode, self._rows, _DRAWN)

    def _rows(self) -> list[str]:
        stones = " ".join(" " if c < 0 else str(c.bit_count()) for c in self._stones) + " "
        potions = "".join(" " if c < 0 else "abcdef"[c] for c in self._potions)
        return [stones, potions[:6], potions[6:]]
