"""BabyAI: missions in simple English in rooms with objects (Chevalier-Boisvert et al. 2018, arXiv:1810.08272)."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._common import Attempts
from amago.registry import require

if TYPE_CHECKING:
    from minigrid.core.world_object import WorldObj
    from minigrid.minigrid_env import MiniGridEnv

VIEW = 7
"""Side length of the agent's square field of view, in cells."""

WORDS = (
    "", "a", "after", "and", "ball", "behind", "blue", "box", "door", "front", "go", "green", "grey", "in", "key", "left", "next",
    "object", "of", "on", "open", "pick", "purple", "put", "red", "right", "the", "then", "to", "up", "yellow", "you", "your",
)  # fmt: skip
"""The vocabulary of missions; the empty word is padding."""
_INDEX = {word: i for i, word in enumerate(WORDS)}

TYPES = ("unseen", "empty", "wall", "door", "key", "ball", "box", "agent")
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
STATES = ("open", "closed", "locked")
CHANNELS = (*TYPES, *COLORS, *STATES)
"""The channels of a cell: its type, the colour of its object, and the state of a door, each one-hot."""

_UNSEEN, _EMPTY, _WALL, _AGENT, _FIRST_THING = range(5)
_THINGS: list[tuple[str, str, str | None]] = [("door", color, state) for color in COLORS for state in STATES]
_THINGS += [(kind, color, None) for kind in ("key", "ball", "box") for color in COLORS]
_CODE = {thing: _FIRST_THING + i for i, thing in enumerate(_THINGS)}


def _bits_of_codes() -> NDArray[np.uint8]:
    rows = [("unseen",), ("empty",), ("wall", "grey"), ("agent",), *_THINGS]
    return np.array([[channel in row for channel in CHANNELS] for row in rows], dtype=np.uint8)


_BITS = _bits_of_codes()

# For each direction, the offsets (dx, dy) from the agent of the cells of its view, in the order of MiniGrid's image[x, y].
_FORWARD = ((1, 0), (0, 1), (-1, 0), (0, -1))
_PLACES = [
    [
        (fx * (VIEW - 1 - j) - fy * (i - VIEW // 2), fy * (VIEW - 1 - j) + fx * (i - VIEW // 2))
        for i in range(VIEW)
        for j in range(VIEW)
    ]
    for fx, fy in _FORWARD
]
_OWN_PLACE = (VIEW // 2) * VIEW + VIEW - 1


def tokens(mission: str, length: int) -> NDArray[np.uint8]:
    """A mission as indices into `WORDS`, uint8 (length,), padded with 0; commas are ignored."""
    words = mission.replace(",", " ").split()
    if len(words) > length:
        raise ValueError(f"mission_length must be at least {len(words)}, the number of words in {mission!r}; got {length}")
    out = np.zeros(length, dtype=np.uint8)
    try:
        out[: len(words)] = [_INDEX[word] for word in words]
    except KeyError as err:
        raise ValueError(f"the mission {mission!r} contains the unknown word {err.args[0]!r}") from None
    return out


def _code(thing: WorldObj) -> int:
    kind = thing.type
    if kind == "wall":
        return _WALL
    if kind == "door":
        return _CODE[kind, thing.color, "open" if thing.is_open else "locked" if thing.is_locked else "closed"]
    return _CODE[kind, thing.color, None]


@functools.cache
def _spread(seen: int, clear: int) -> tuple[int, int]:
    """The visible cells of a row of the view and of the next, by MiniGrid's rule, as bit masks: from the cells that are visible from
    the previous row, and the transparent cells of this one.
    """
    ahead = 0
    for i in range(VIEW - 1):
        if seen & clear & (1 << i):
            seen |= 2 << i
            ahead |= 3 << i
    for i in range(VIEW - 1, 0, -1):
        if seen & clear & (1 << i):
            seen |= 1 << (i - 1)
            ahead |= 3 << (i - 1)
    return seen, ahead


def partial_grid(level: MiniGridEnv) -> NDArray[np.uint8]:
    """The agent's field of view, uint8 (7, 7, 17) indexed [x, y, channel of `CHANNELS`]; the same cells as MiniGrid's
    `gen_obs`.

    The agent stands at [3, 6] and faces [3, 0]; its own cell shows the object that it carries.
    """
    grid, width, height = level.grid.grid, level.grid.width, level.grid.height
    x, y = int(level.agent_pos[0]), int(level.agent_pos[1])
    codes, clear = [], [0] * VIEW
    for place, (dx, dy) in enumerate(_PLACES[level.agent_dir]):
        cx, cy = x + dx, y + dy
        if not (0 <= cx < width and 0 <= cy < height):
            codes.append(_WALL)
            continue
        thing = grid[cy * width + cx]
        if thing is None:
            codes.append(_EMPTY)
            clear[place % VIEW] |= 1 << place // VIEW
        else:
            codes.append(_code(thing))
            if thing.see_behind():
                clear[place % VIEW] |= 1 << place // VIEW
    codes[_OWN_PLACE] = _EMPTY if level.carrying is None else _code(level.carrying)
    seen = 1 << VIEW // 2
    for j in range(VIEW - 1, -1, -1):
        row, seen = _spread(seen, clear[j])
        for i in range(VIEW):
            if not row >> i & 1:
                codes[i * VIEW + j] = _UNSEEN
    return _BITS[codes].reshape(VIEW, VIEW, len(CHANNELS))


def full_grid(level: MiniGridEnv, size: int) -> NDArray[np.uint8]:
    """The whole grid, uint8 (size, size, 17) indexed [x, y, channel]; cells outside it are "unseen".

    The agent's cell has the channels of the agent and of the object that it carries.
    """
    width, height = level.grid.width, level.grid.height
    codes = np.full((size, size), _UNSEEN)
    cells = [_EMPTY if thing is None else _code(thing) for thing in level.grid.grid]
    codes[:width, :height] = np.array(cells).reshape(height, width).T
    out = _BITS[codes]
    x, y = int(level.agent_pos[0]), int(level.agent_pos[1])
    out[x, y] = _BITS[_AGENT]
    if level.carrying is not None:
        out[x, y] |= _BITS[_code(level.carrying)]
    return out


def partial_image(level: MiniGridEnv, tile: int) -> NDArray[np.uint8]:
    """The agent's field of view drawn by MiniGrid, uint8 (7 * tile, 7 * tile, 3)."""
    return level.get_frame(tile_size=tile, agent_pov=True)  # type: ignore[no-any-return]


def full_image(level: MiniGridEnv, size: int, tile: int) -> NDArray[np.uint8]:
    """The whole grid drawn by MiniGrid, uint8 (size * tile, size * tile, 3), padded with black below and to the right."""
    out = np.zeros((size * tile, size * tile, 3), dtype=np.uint8)
    frame = level.get_frame(highlight=False, tile_size=tile)
    out[: frame.shape[0], : frame.shape[1]] = frame
    return out


Observation = dict[str, NDArray[Any]]

SPLITS = ("train", "test")
OBS_KINDS = ("partial-grid", "full-grid", "partial-image", "full-image")

_LOCAL_SIZES = ("S5N2", "S6N2", "S6N3", "S6N4", "S7N4", "S7N5", "S8N2", "S8N3", "S8N4", "S8N5", "S8N6", "S8N7")
FAMILIES: dict[str, tuple[str, ...]] = {
    "goto-local": (
        "GoToRedBallGrey", "GoToRedBall", "GoToRedBallNoDists", "GoToObj", "GoToObjS4", "GoToObjS6", "GoToRedBlueBall", "GoToLocal",
        *(f"GoToLocal{size}" for size in _LOCAL_SIZES),
    ),
    "goto": (
        "GoTo", "GoToOpen", "GoToObjMaze", "GoToObjMazeOpen", "GoToObjMazeS4R2", "GoToObjMazeS4", "GoToObjMazeS5", "GoToObjMazeS6",
        "GoToObjMazeS7", "GoToImpUnlock", "GoToSeq", "GoToSeqS5R2", "GoToDoor", "GoToObjDoor", "ActionObjDoor",
    ),
    "open": (
        "Open", "OpenRedDoor", "OpenDoor", "OpenDoorColor", "OpenDoorLoc", "OpenTwoDoors", "OpenRedBlueDoors", "OpenDoorsOrderN2",
        "OpenDoorsOrderN4",
    ),
    "pickup": (
        "Pickup", "UnblockPickup", "PickupLoc", "PickupDist", "PickupAbove", "OneRoomS8", "OneRoomS12", "OneRoomS16", "OneRoomS20",
        "FindObjS5", "FindObjS6", "FindObjS7",
    ),
    "putnext": (
        "PutNextLocal", "PutNextLocalS5N3", "PutNextLocalS6N4", "PutNextS4N1", "PutNextS5N2", "PutNextS5N1", "PutNextS6N3",
        "PutNextS7N4", "PutNextS5N2Carrying", "PutNextS6N3Carrying", "PutNextS7N4Carrying", "MoveTwoAcrossS5N2", "MoveTwoAcrossS8N9",
    ),
    "unlock": (
        "Unlock", "UnlockLocal", "UnlockLocalDist", "KeyInBox", "UnlockPickup", "UnlockPickupDist", "BlockedUnlockPickup",
        "UnlockToUnlock", "KeyCorridor", "KeyCorridorS3R1", "KeyCorridorS3R2", "KeyCorridorS3R3", "KeyCorridorS4R3",
        "KeyCorridorS5R3", "KeyCorridorS6R3",
    ),
    "synth": (
        "Synth", "SynthS5R2", "SynthLoc", "SynthSeq", "MiniBossLevel", "BossLevel", "BossLevelNoUnlock",
    ),
}  # fmt: skip
"""The levels of BabyAI by the kind of their missions; levels for debugging are left out."""
LEVELS = tuple(level for levels in FAMILIES.values() for level in levels)
TEST_LEVELS = (
    "GoToRedBlueBall", "GoToLocalS8N7", "GoToObjMazeS5", "GoToSeqS5R2", "OpenDoorsOrderN4", "PickupAbove", "OneRoomS12",
    "PutNextS6N3", "UnlockPickupDist", "KeyCorridorS4R3", "SynthLoc",
)  # fmt: skip
"""The levels of the test split by default; each resembles some training levels."""
TRAIN_LEVELS = tuple(level for level in LEVELS if level not in TEST_LEVELS)

MOST_WORDS = 72
"""Words of the longest mission: four clauses like "put the grey box in front of you next to ...", and the words that join
them."""
_WORDS = {"goto-local": 5, "goto": 24, "open": 10, "pickup": 9, "putnext": 19, "unlock": 9, "synth": MOST_WORDS}
LARGEST = 22
"""Side length of the largest levels, in cells."""
_FIRST_TEST_SEED = 2**30


def level_names(levels: str | Iterable[str]) -> tuple[str, ...]:
    """Resolve names of levels, their ids ("BabyAI-GoToLocal-v0") and keys of `FAMILIES` to names of levels, without duplicates."""
    wanted = [levels] if isinstance(levels, str) else list(levels)
    known = {name.lower(): name for name in LEVELS}
    out: list[str] = []
    for name in wanted:
        short = str(name).removeprefix("BabyAI-")
        short = short[:-3] if short[-3:-1] == "-v" else short
        if short in FAMILIES:
            out += FAMILIES[short]
        elif short.lower() in known:
            out.append(known[short.lower()])
        else:
            raise ValueError(
                f"levels has {name!r}, but BabyAI has {common.similar(short, (*LEVELS, *FAMILIES), list(FAMILIES))}"
            )
    if not out:
        raise ValueError(f"levels must name at least one level, got {levels!r}")
    return tuple(dict.fromkeys(out))


def longest_mission(levels: str | Iterable[str]) -> int:
    """The maximum number of words in a mission of these levels."""
    names = level_names(levels)
    return max(_WORDS[family] for family, members in FAMILIES.items() if set(members) & set(names))


@functools.cache
def _ids() -> dict[str, str]:
    require("minigrid", "minigrid")
    ids = [name for name in gym.registry if name.startswith("BabyAI-")]
    return {name.removeprefix("BabyAI-")[:-3]: name for name in ids}


def _make(level: str) -> Any:
    made: MiniGridEnv = gym.make(_ids()[level], disable_env_checker=True).unwrapped
    made.gen_obs = lambda: None  # MiniGrid's observation would be computed in vain: this module computes its own
    return made


@gin.configurable(module="amago.envs.builtin")
class MultitaskMetaBabyAI(gym.Env[Observation, np.int64]):
    """k attempts at one BabyAI mission in one world; each rollout draws another level, world and mission.

    A rollout draws a level (uniformly) and a seed, with which each attempt begins: rooms, objects, the agent's position and the
    mission are the same. An attempt ends with success, with failure (in some levels), or at its step limit, the smaller of
    ``episode_length`` and the level's own; its last step returns the first observation of the next attempt. The rollout
    terminates (never truncates, because the clock is observed) with the last attempt.

    Reward: ``1 - 0.9 * steps / limit`` in the step that succeeds, else 0.

    Actions, ``Discrete(7)``: MiniGrid's turn left, turn right, forward, pick up, drop, toggle, and "done", which does nothing.

    Observation, a Dict:

    - "observation", uint8, according to ``obs_kind``: "partial-grid" ``(7, 7, 17)``, the agent's field of view, and "full-grid"
      ``(grid_size, grid_size, 17)``, the whole grid, each cell as the one-hot `CHANNELS`; "partial-image" and "full-image"
      ``(H, W, 3)``, the same drawn with ``tile_size`` pixels per cell;
    - "mission", uint8 ``(mission_length,)``: the words as indices into `WORDS`, padded with 0;
    - "status", float32 ``(7,)``: the agent's direction (4, one-hot), 1 at the first observation of an attempt, the fraction of
      attempts that are over, and steps of this attempt divided by its limit.

    Metrics at the end of attempt i (from 0): ``Attempt {i} Success`` and ``Attempt {i} Return``; at the end of the rollout
    ``Success Rate``, the mean over attempts. `env_name` separates them by level.

    Args:
        levels: names of levels or keys of `FAMILIES`; None means `TRAIN_LEVELS` or `TEST_LEVELS`, according to ``split``.
        split: "train" or "test"; their seeds are disjoint.
        k_episodes: attempts per rollout.
        obs_kind: one of `OBS_KINDS`.
        episode_length: maximum steps per attempt.
        mission_length: maximum words per mission; see `longest_mission`. `MOST_WORDS` suffices for all levels.
        grid_size: side length of full views in cells; smaller levels are padded. `LARGEST` suffices for all levels.
        tile_size: pixels per cell in images.
        num_seeds: seeds of the training split are below this number. With few seeds, agents memorise the worlds.
        render_mode: None or "rgb_array", 24 pixels per cell.

    Attributes:
        level, seed, mission: of this rollout.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}

    def __init__(
        self,
        levels: str | Sequence[str] | None = None,
        split: str = "train",
        k_episodes: int = 2,
        obs_kind: str = "partial-grid",
        episode_length: int = 200,
        mission_length: int = MOST_WORDS,
        grid_size: int = LARGEST,
        tile_size: int = 8,
        num_seeds: int = 1_000_000,
        render_mode: str | None = None,
    ) -> None:
        self.split = common.check_choice("split", split, SPLITS)
        self.obs_kind = common.check_choice("obs_kind", obs_kind, OBS_KINDS)
        default = TRAIN_LEVELS if split == "train" else TEST_LEVELS
        self.levels = default if levels is None else level_names(levels)
        self.k_episodes = common.check_int("k_episodes", k_episodes, 1)
        self.episode_length = common.check_int("episode_length", episode_length, 1)
        self.mission_length = common.check_int("mission_length", mission_length, 1)
        self.grid_size = common.check_int("grid_size", grid_size, 3)
        self.tile_size = common.check_int("tile_size", tile_size, 1)
        self.num_seeds = common.check_int("num_seeds", num_seeds, 1)
        if self.num_seeds > _FIRST_TEST_SEED:
            raise ValueError(
                f"num_seeds must be at most {_FIRST_TEST_SEED}, the first seed of the test split, got {num_seeds!r}"
            )
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        self.horizon = self.k_episodes * self.episode_length
        _ids()
        self._made: dict[str, Any] = {}
        self._view, box = self._choose_view()
        self.observation_space = gym.spaces.Dict(
            {
                "observation": box,
                "mission": gym.spaces.Box(0, len(WORDS) - 1, (self.mission_length,), np.uint8),
                "status": gym.spaces.Box(0.0, 1.0, (7,), np.float32),
            }
        )
        self.action_space = gym.spaces.Discrete(7)
        self.level, self.seed, self.mission = self.levels[0], 0, ""
        self._tokens = np.zeros(self.mission_length, dtype=np.uint8)
        self._env: MiniGridEnv = None  # until the first reset
        self._attempts = Attempts(self.k_episodes, self.episode_length, mean=("Success", "Success Rate"))

    def _choose_view(self) -> tuple[Callable[[], NDArray[np.uint8]], gym.spaces.Box]:
        """The function that makes "observation" for this ``obs_kind``, and its space."""
        size, tile, bits = self.grid_size, self.tile_size, len(CHANNELS)
        if self.obs_kind == "partial-grid":
            return lambda: partial_grid(self._env), gym.spaces.Box(0, 1, (VIEW, VIEW, bits), np.uint8)
        if self.obs_kind == "full-grid":
            return lambda: full_grid(self._env, size), gym.spaces.Box(0, 1, (size, size, bits), np.uint8)
        if self.obs_kind == "partial-image":
            side = VIEW * tile
            return lambda: partial_image(self._env, tile), gym.spaces.Box(0, 255, (side, side, 3), np.uint8)
        return lambda: full_image(self._env, size, tile), gym.spaces.Box(0, 255, (size * tile, size * tile, 3), np.uint8)

    @property
    def env_name(self) -> str:
        return f"babyai_{self.level}" + ("-test" if self.split == "test" else "")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        rng = self.np_random
        self.level = self.levels[int(rng.integers(len(self.levels)))]
        low, high = (0, self.num_seeds) if self.split == "train" else (_FIRST_TEST_SEED, 2 * _FIRST_TEST_SEED)
        self.seed = int(rng.integers(low, high))
        if self.level not in self._made:
            self._made[self.level] = _make(self.level)
        self._env = self._made[self.level]
        self._attempts.begin_rollout()
        self._begin_attempt()
        if self.obs_kind.startswith("full") and max(self._env.width, self._env.height) > self.grid_size:
            raise ValueError(
                f"grid_size must be at least {max(self._env.width, self._env.height)}, the size of {self.level}; got {self.grid_size}"
            )
        self.mission = self._env.mission
        self._tokens = tokens(self.mission, self.mission_length)
        return self._observe(), {}

    def _begin_attempt(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # BabyAI prints a line whenever it rejects a mission
            self._env.reset(seed=self.seed)
        self._env.max_steps = min(self._env.max_steps, self.episode_length)
        self._attempts.begin()

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._attempts.under_way:
            common.refuse_step("MultitaskMetaBabyAI")
        _, level_reward, terminated, truncated, _ = self._env.step(common.check_action(action, 7))
        reward = float(level_reward)
        self._attempts.step(reward)
        if not (terminated or truncated):
            return self._observe(), reward, False, False, {}
        info = self._attempts.end({"Success": float(reward > 0)})
        if self._attempts.under_way:
            self._begin_attempt()
        return self._observe(), reward, not self._attempts.under_way, False, info

    def _observe(self) -> Observation:
        status = np.zeros(7, dtype=np.float32)
        status[self._env.agent_dir] = 1.0
        steps, attempts = self._attempts.steps, self._attempts.over
        status[4:] = steps == 0, attempts / self.k_episodes, steps / self._env.max_steps
        return {"observation": self._view(), "mission": self._tokens.copy(), "status": status}

    def render(self) -> Any:
        """The current grid with the agent's field of view highlighted, uint8 (H, W, 3)."""
        if self.render_mode is None or self._env is None:
            return None
        return self._env.get_frame(tile_size=common.CELL)


ALL_BABYAI_TASKS = LEVELS
"""All levels, under the name that scripts for the original system import."""
