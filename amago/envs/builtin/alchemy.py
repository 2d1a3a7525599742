"""Symbolic Alchemy: learn by experiment how potions change stones, then exploit it (Wang et al. 2021, arXiv:2102.02926)."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin import _drawing as drawing
from amago.envs.builtin.alchemy_chemistry import COLOURS, CORNERS, GOAL, POTIONS, STONES, VALUES, Chemistry, appearances
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

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

_POTION_COLOURS: tuple[drawing.Color, ...] = (
    (40, 110, 70), (120, 200, 140), (160, 40, 40), (240, 130, 120), (40, 70, 150), (120, 170, 240),
)  # fmt: skip
_STONE_COLOURS: dict[int, drawing.Color] = {-1: (70, 60, 120), 0: (150, 140, 190), 1: (215, 205, 240)}
_STONE_POWERS = {-1: 8.0, 0: 2.8, 1: 2.0}  # pointed, between, round: a square to a disc


def action_for(stone: int, target: int) -> int:
    """The action that puts ``stone`` (0 to 2) into the cauldron (target `CAULDRON`) or into potion ``target - 1``."""
    return 1 + stone * _TARGETS + target


@gin.configurable(module="amago.envs.builtin")
class SymbolicAlchemy(NamedArguments, gym.Env[Observation, np.int64]):
    """Trials with one hidden chemistry: dip stones into potions to raise their value, then put them into the cauldron.

    A trial has 3 stones and 12 potions, drawn uniformly and independently. A stone is a corner of a hidden cube, with the value
    -3, -1, 1 or 15 if 0, 1, 2 or 3 of its bits are set. A potion moves it along one edge: six colours form three pairs, each of
    which sets and clears one bit. The chemistry (`alchemy_chemistry`) determines the bit and direction of each colour, which
    edges of the cube exist (0 to 3 bottlenecks), and the appearance of the corners. It is drawn for each rollout and is the
    same in all of its trials.

    Actions, ``Discrete(40)``: 0 does nothing; ``1 + 13 * stone + target`` puts a stone into the cauldron (target 0) or into
    potion ``target - 1``. A potion is used up even if it has no effect, and a stone is used up by the cauldron. Actions on a
    used stone or potion do nothing. Every trial lasts ``steps_per_trial`` steps; its last step returns the first observation of
    the next trial. The rollout terminates (never truncates) with the last trial.

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
        render_mode: None, "ansi" (text) or "rgb_array" (uint8 (204, 288, 3)).

    Attributes:
        horizon: steps per rollout.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

    def __init__(self, num_trials: int = 10, steps_per_trial: int = 20, render_mode: str | None = None) -> None:
        self.num_trials = common.check_int("num_trials", num_trials, 1)
        self.steps_per_trial = common.check_int("steps_per_trial", steps_per_trial, 1)
        self.horizon = self.num_trials * self.steps_per_trial
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (_OBS_SIZE,), np.float32)
        self.action_space = gym.spaces.Discrete(_ACTIONS)
        self._chemistry = Chemistry.of(0, 0, 0)
        self._rows = np.zeros((CORNERS, _STONE_SIZE), dtype=np.float32)
        self._obs = np.zeros(_OBS_SIZE, dtype=np.float32)
        self._stones: list[int] = [-1] * STONES  # corners; -1: used
        self._potions: list[int] = [-1] * POTIONS  # colours; -1: used
        self._clock = self.horizon
        self._trial_return = 0.0
        self._best = self._paid = self._potions_used = 0

    @property
    def chemistry(self) -> Chemistry:
        """The hidden chemistry of this rollout."""
        return self._chemistry

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
        self._chemistry = Chemistry.random(self.np_random)
        self._rows = np.zeros((CORNERS, _STONE_SIZE), dtype=np.float32)
        self._rows[:, :3] = appearances()[self._chemistry.appearance]
        self._rows[:, 3] = [_SHOWN_VALUE[value] for value in VALUES]
        self._clock = self._best = self._paid = self._potions_used = 0
        self._begin_trial()
        return self._obs.copy(), {}

    def _begin_trial(self) -> None:
        rng, obs = self.np_random, self._obs
        corners, colours = rng.integers(CORNERS, size=STONES), rng.integers(COLOURS, size=POTIONS)
        self._stones, self._potions = corners.tolist(), colours.tolist()
        obs[:_FIRST_POTION] = self._rows[corners].reshape(-1)
        obs[_FIRST_POTION:] = _COLOUR_ROWS[colours].reshape(-1)
        self._trial_return = 0.0

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
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
        info: dict[str, Any] = {
            f"{AMAGO_ENV_LOG_PREFIX} Trial {self._clock // self.steps_per_trial - 1} Return": self._trial_return
        }
        if self._clock < self.horizon:
            self._begin_trial()
            return self._obs.copy(), reward, False, False, info
        info[f"{AMAGO_ENV_LOG_PREFIX} Best Stones"] = float(self._best)
        info[f"{AMAGO_ENV_LOG_PREFIX} Stones In Cauldron"] = float(self._paid)
        info[f"{AMAGO_ENV_LOG_PREFIX} Potions Used"] = float(self._potions_used)
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
        after = self._chemistry.effects[corner][colour]
        if after != corner:
            self._stones[stone] = after
            self._obs[stone * _STONE_SIZE : (stone + 1) * _STONE_SIZE] = self._rows[after]

    def render(self) -> Any:
        """The stones and potions of this trial as an image or as text, according to ``render_mode``.

        Text: each stone's appearance and value, each potion's colour (a to f); "-" if used. Image: each stone in its size, colour
        and roundness, above one golden mark for each bit of its value (three for the best); each potion in its colour, where
        opposites are dark and light; used ones are gone. The bars below show the steps of this trial, and the trials.
        """
        return drawing.render(self.render_mode, self._text, self._draw)

    def _text(self) -> str:
        looks = appearances()[self._chemistry.appearance].astype(int)
        stones = "  ".join("-" if c < 0 else f"({', '.join(map(str, looks[c]))}) {VALUES[c]:+d}" for c in self._stones)
        potions = " ".join("-" if c < 0 else "abcdef"[c] for c in self._potions)
        done = self._clock >= self.horizon
        place = f"trial {self.trial + 1 - done} of {self.num_trials}, step {self._clock} of {self.horizon}"
        return f"stones   {stones}\npotions  {potions}\n{place}"

    def _draw(self) -> NDArray[np.uint8]:
        frame = drawing.blank(204, 288, drawing.WHITE)
        looks = appearances()[self._chemistry.appearance]
        for i, corner in enumerate(self._stones):
            middle = 48 + 96 * i
            if corner < 0:
                continue
            size, colour, roundness = looks[corner].tolist()
            drawing.blob(frame, (middle, 42), 22 + 10 * size, _STONE_COLOURS[int(colour)], _STONE_POWERS[int(roundness)])
            for mark in range(corner.bit_count()):
                drawing.blob(frame, (middle + 14 * (mark - 1), 88), 5, drawing.GOLD)
        for i, colour in enumerate(self._potions):
            at = 24 + 48 * (i % 6), 120 + 44 * (i // 6)
            drawing.blob(frame, at, 15, drawing.GRID)
            drawing.blob(frame, at, 13, drawing.WHITE if colour < 0 else _POTION_COLOURS[colour])
        drawing.progress(frame, 188, 8, 1.0 - self.steps_left / self.steps_per_trial, drawing.GREY)
        drawing.progress(frame, 196, 8, min(self.trial + 1, self.num_trials) / self.num_trials, drawing.DARK)
        return frame
