"""The built-in environments: where each is, what it needs, and where to begin."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A built-in environment.

    Attributes:
        name: of its class.
        module: to import it from.
        about: what it is, or what must be remembered.
        docs: page and heading.
        example: a script; None: there is none.
        extra: of the package, that it needs; None: none.
        zoo: names of settings for it, without "zoo/".
        arguments: with which it is made to look at its spaces.
        spaces: observations and actions in words, for where the environment cannot be made.
        made: whether those arguments are all that it needs to be made.
        vectorized: it has many rows itself.
    """

    name: str
    module: str
    about: str
    docs: str
    example: str | None = None
    extra: str | None = None
    zoo: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    spaces: tuple[str, str] | None = None
    made: bool = True
    vectorized: bool = False

    def cls(self) -> Any:
        """The class; importing its module needs no extra."""
        return getattr(importlib.import_module(self.module), self.name)

    def look(self) -> tuple[str, str, int | None]:
        """(observations, actions, most steps of a rollout; None: not known) of an environment that is made for it."""
        env = self.cls()(**self.arguments)
        try:
            return str(env.observation_space), str(env.action_space), getattr(env, "horizon", None)
        finally:
            env.close()


_B = "amago.envs.builtin"
_OWN, _BENCH = "docs/environments.md#", "docs/benchmarks.md#"

ENTRIES: tuple[Entry, ...] = (
    Entry("MetaFrozenLake", _B, "the holes of an unknown lake, from one attempt to the next", _OWN + "metafrozenlake",
          "examples/00_meta_frozen_lake.py", zoo=("solve_lake",), arguments={"size": 5}),
    Entry("RoomKeyDoor", _B, "where key and door are, from one trial to the next", _OWN + "roomkeydoor",
          "examples/05_dark_key_door.py", zoo=("solve_room",)),
    Entry("TMazePassive", _B, "one bit, from the first step to the last", _OWN + "tmazepassive-and-tmazeactive",
          "examples/04_tmaze.py", zoo=("solve_tmaze", "tmaze", "tmaze_mamba", "tmaze_10k")),
    Entry("TMazeActive", _B, "one bit, which must first be looked for", _OWN + "tmazepassive-and-tmazeactive", "examples/04_tmaze.py"),
    Entry("SymbolicAlchemy", _B, "what this chemistry's potions do, from one trial to the next", _OWN + "symbolicalchemy",
          "examples/06_alchemy.py", zoo=("alchemy", "alchemy_by_colour")),
    Entry("MazeRunner", _B, "where the ways of a maze lead, and what actions do", _OWN + "mazerunner",
          "examples/13_mazerunner_relabeling.py", zoo=("mazerunner",)),
    Entry("PointRobot", _B, "where the goal is, from one attempt to the next", _OWN + "pointrobot",
          "examples/18_point_robot.py", zoo=("point_robot",)),
    Entry("Nim", _B, "nothing: a game whose legal moves change", _OWN + "nim"),
    Entry("ToyMixture", _B, "three tasks whose returns are 1, 90 and 2,000", _OWN + "toymixture", "examples/19_returns_of_any_size.py"),
    Entry("POPGymGame", f"{_B}.popgym_envs", "48 small games of cards, boards, bandits, poles and mazes", _BENCH + "popgym",
          "examples/03_popgym_suite.py", "popgym", ("popgym", "popgym_cartpole", "popgym_long"), {"game": "RepeatPreviousEasy"},
          ("those of the game, and a clock", "those of the game")),
    Entry("MultiDomainPOPGym", f"{_B}.popgym_envs", "27 of these games, one of them in each rollout", _BENCH + "popgym",
          "examples/03_popgym_suite.py", "popgym", ("popgym",),
          spaces=("Dict('observation': bits of all games, 'status': (4,) float32)", "Discrete, as many as the largest game has")),
    Entry("GymnaxCompatibility", f"{_B}.gymnax_envs", "hundreds of environments in one call of jax", _BENCH + "gymnax",
          "examples/02_gymnax.py", "gymnax", ("gymnax",), spaces=("those of the gymnax environment", "those of the gymnax environment"),
          made=False, vectorized=True),
    Entry("XLandMiniGrid", f"{_B}.xland_envs", "hidden goals and rules in a small world, from one attempt to the next",
          _BENCH + "xland-minigrid", "examples/11_xland_minigrid.py", "xland", ("xland",), {"num_envs": 1, "num_rulesets": 20},
          ("Dict('image': (5, 5, 25) uint8, 'pocket': (25,) uint8, 'status': (7,) float32)", "Discrete(6)"), vectorized=True),
    Entry("HalfCheetahVel", f"{_B}.half_cheetah_vel", "a hidden target velocity", _BENCH + "halfcheetahvel",
          "examples/12_half_cheetah_vel.py", "mujoco", ("half_cheetah_vel", "half_cheetah_vel_wide"),
          spaces=("Box(-inf, inf, (19,), float32)", "Box(-1.0, 1.0, (6,), float32)")),
    Entry("MetaWorld", f"{_B}.metaworld_envs", "hidden goals of a robot arm, from one attempt to the next", _BENCH + "metaworld",
          "examples/07_metaworld.py", "metaworld", ("metaworld", "metaworld_ml45"),
          spaces=("Box(-inf, inf, (41,), float32)", "Box(-1.0, 1.0, (4,), float32)"), made=False),
    Entry("DeepMindControl", f"{_B}.dmc", "continuous control, fully observed", _BENCH + "deepmindcontrol",
          "examples/01_basic_gym.py", "dmc", arguments={"name": "cartpole-balance"},
          spaces=("those of the task, one float32 vector", "those of the task")),
    Entry("PokemonBattle", f"{_B}.pokemon", "the opponent's team, which is seen piece by piece", _BENCH + "pokemonbattle",
          "examples/15_pokemon.py", "pokemon", ("pokemon",), spaces=("numbers in [-1, 1], and a mask of bits", "Discrete, the choices of a battle"),
          made=False),
    Entry("MultitaskMetaBabyAI", f"{_B}.babyai", "rooms and things of a mission in words, from one attempt to the next", _BENCH + "babyai",
          "examples/10_babyai.py", "minigrid", ("babyai",),
          spaces=("Dict('mission': (72,) uint8, 'observation': (7, 7, 17) uint8, 'status': (7,) float32)", "Discrete(7)")),
    Entry("CrafterInstructions", f"{_B}.crafter", "an open world, with up to five goals in a row", _BENCH + "crafter",
          "examples/16_crafter_instructions.py", "crafter", ("crafter", "crafter_long"),
          spaces=("Dict('achieved': (3,), 'goals': (5, 3), 'observation': (9, 7, 19) uint8, 'status': (25,) float32)", "Discrete(17)")),
    Entry("AtariGame", f"{_B}.atari", "what moves, from picture to picture", _BENCH + "atari", "examples/08_ale.py", "atari",
          ("ale", "atari_multigame"), spaces=("Box(0, 255, (84, 84, 3), uint8)", "Discrete(18)")),
    Entry("TwoAttemptMTProcgen", f"{_B}.procgen", "16 games with generated levels, two attempts at each level", _BENCH + "procgen",
          "examples/09_multitask_procgen.py", "procgen", ("procgen",),
          spaces=("Box(0, 255, (64, 64, 3), uint8)", "Discrete(15)")),
    Entry("RetroArcade", f"{_B}.retro", "games of many consoles through emulators", _BENCH + "retro",
          "examples/17_retro_arcade.py", "retro", ("retro",), spaces=("Box(0, 255, (84, 84, 3), uint8)", "MultiBinary, a bit a button"), made=False),
)  # fmt: skip
"""The built-in environments, those without an extra first, each group in the order of its page."""
