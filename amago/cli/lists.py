"""``amago list``: the built-in environments, the settings that come with the library, and its extras."""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.metadata
import re
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import NamedTuple

from packaging.requirements import Requirement

from amago import config
from amago.describe import fit_width

Row = dict[str, object]


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "List the built-in environments (envs: spaces, packages, examples, settings), the gin files for --configs zoo/NAME (zoo: their "
        "tasks, and what they reached) or the extras of the package (extras: what each is for, and what is missing). "
        "Example: amago list envs RoomKeyDoor"
    )
    parser.add_argument("what", choices=sorted(LISTS), help="what to list")
    parser.add_argument("name", nargs="?", default=None, help="show this one alone, with everything that is known of it")


def run(args: Namespace) -> int:
    rows = {str(row["name"]).removeprefix("zoo/"): row for row in LISTS[args.what]()}
    if args.name is not None:
        given = args.name.lower().removeprefix("zoo/").removesuffix(".gin")
        known = {name.lower(): name for name in rows}
        if given not in known:
            raise ValueError(f"{args.what} has no {args.name!r}; {config.suggestion(args.name, rows)}")
        rows = {given: rows[known[given]]}
    for row in rows.values():
        shown = {k: ", ".join(v) if isinstance(v, list) else str(v) for k, v in row.items() if v not in (None, "", [])}
        if args.name is None:
            print(fit_width(f"{shown.pop('name'):<20} {shown.pop('about')}"))
            for name in ("spaces", "example", "settings", "used by", "reached", "missing", "to install"):
                if name in shown:
                    print(fit_width(f"    {name}: {shown[name]}", hang=8))
        elif "gin" in shown:
            print(shown["gin"])
        else:
            print("\n".join(fit_width(f"{name:<14} {value}", hang=15) for name, value in shown.items()))
    return 0


def environments() -> Iterator[Row]:
    """The built-in environments, those without an extra first."""
    for e in ENTRIES:
        module = f"amago.envs.builtin.{e.module}" if e.module else "amago.envs.builtin"
        row: Row = {"name": e.name, "environment": f"{module}:{e.name}", "about": e.about}
        if e.extra is None:
            make = vars(importlib.import_module(module))[e.name]
            env = make(size=5) if e.name == "MetaFrozenLake" else make()
            row["spaces"] = f"{env.observation_space} -> {env.action_space}"
        else:
            row |= {"extra": e.extra} | _needs(e.extra)
        page = "environments" if e.extra is None else "benchmarks"
        yield row | {"example": e.example and f"examples/{e.example}.py", "settings": [f"zoo/{z}" for z in e.zoo], "docs": f"docs/{page}.md"}  # fmt: skip


def zoo() -> Iterator[Row]:
    """The files of the zoo: the fields in their first lines, and their text."""
    for name, path in config.zoo_files().items():
        text = path.read_text(encoding="utf-8")
        head = re.findall(r"^# (Task|Used by|Reached): (.+)", text, re.MULTILINE)
        reached = [value for key, value in head if key == "Reached"]
        about, used = dict(head)["Task"], dict(head)["Used by"]
        yield {"name": name, "about": about, "used by": used, "reached": reached, "gin": f"# {path}\n{text}"}


def extras() -> Iterator[Row]:
    """The extras of the package: the purpose of each, and what of it is missing."""
    for name, purpose in EXTRAS.items():
        yield {"name": name, "about": purpose} | _needs(name)


def _needs(extra: str) -> Row:
    lacks = missing(extra)
    return {"missing": [what for what, _ in lacks], "to install": list(dict.fromkeys(command for _, command in lacks))}


LISTS: dict[str, Callable[[], Iterator[Row]]] = {"envs": environments, "zoo": zoo, "extras": extras}
EXTRAS: dict[str, str] = {
    "classic": "CartPole, Pendulum and others in a window or filmed",
    "export": "policies as ONNX files",
    "hub": "amago push, amago pull",
    "mlflow": "--log_to mlflow",
    "offline": "Minari and HDF5 datasets",
    "parquet": "Parquet files and LeRobot datasets",
    "plots": "pictures: amago demo, amago eval --memory",
    "ray": "--ray: collectors on many machines",
    "report": "amago report, amago watch",
    "s3": "a bus in a bucket: --bus s3://...",
    "sftp": "a bus over ssh: --bus sftp://...",
    "tensorboard": "--tensorboard",
    "trackio": "--log_to trackio",
    "tune": "amago tune",
    "video": "films as MP4: amago eval --video, --video-interval, cards (GIF needs Pillow alone)",
    "wandb": "--log: Weights & Biases",
    "mujoco": "HalfCheetahVel, and Gymnasium's MuJoCo environments",
    "dmc": "DeepMind Control",
    "box2d": "LunarLander and others of Gymnasium",
    "metaworld": "Meta-World",
    "popgym": "POPGym",
    "gymnax": "gymnax",
    "jax": "JaxVectorEnv: environments in JAX",
    "xland": "XLand-MiniGrid",
    "minigrid": "BabyAI and MiniGrid",
    "atari": "Atari",
    "crafter": "Crafter",
    "retro": "console games",
    "pokemon": "Pokemon battles",
    "procgen": "Procgen",
    "docs": "building the docs site",
}
"""The purposes of the extras that something can be used with; ``envs`` and ``dev`` are made of these."""
PROGRAMS = {"pokemon": ("node", "apt-get install nodejs npm, then make showdown")}
LIBRARIES = {"procgen": ("Qt5Gui", "apt-get install --no-install-recommends libqt5core5a libqt5gui5")}
"""Programs and system libraries that extras need besides packages: (name, how to get it)."""


def missing(extra: str) -> list[tuple[str, str]]:
    """(requirement of an extra that this machine does not meet, command that installs it); nothing is imported."""
    if extra not in EXTRAS:
        raise ValueError(f"there is no extra {extra!r}; the extras are {', '.join(EXTRAS)}")
    found = [(what, f"pip install 'amago[{extra}]'") for what in unmet(f"amago[{extra}]")]
    if extra in PROGRAMS and shutil.which(PROGRAMS[extra][0]) is None:
        found.append((f"the program {PROGRAMS[extra][0]}", PROGRAMS[extra][1]))
    if extra in LIBRARIES and ctypes.util.find_library(LIBRARIES[extra][0]) is None:
        found.append((f"the library {LIBRARIES[extra][0]}", LIBRARIES[extra][1]))
    return found


def unmet(requirement: str) -> list[str]:
    """Unmet parts of a requirement such as "gymnasium[box2d]>=1.0", its extras included: "NAME is not installed", "NAME 1.0 is
    not >=2"."""
    return list(dict.fromkeys(_unmet(Requirement(requirement))))


def _unmet(r: Requirement) -> Iterator[str]:
    try:
        version = importlib.metadata.version(r.name)
    except importlib.metadata.PackageNotFoundError:
        yield f"{r.name} is not installed"
        return
    if not r.specifier.contains(version, prereleases=True):
        yield f"{r.name} {version} is not {r.specifier}"
    for inner in map(Requirement, (importlib.metadata.requires(r.name) or []) if r.extras else []):
        marker = inner.marker
        if marker is not None and not marker.evaluate({"extra": ""}) and any(marker.evaluate({"extra": e}) for e in r.extras):
            yield from _unmet(inner)


class Entry(NamedTuple):
    """A built-in environment."""

    name: str  # of its class
    about: str  # a description, or the information that must be remembered
    example: str | None = None  # a script in ``examples``
    zoo: tuple[str, ...] = ()  # names of settings for it
    module: str = ""  # in `amago.envs.builtin`; "": that package itself
    extra: str | None = None  # of the package, that it needs


ENTRIES = (
    Entry("MetaFrozenLake", "the holes of an unknown lake, from one attempt to the next", "00_meta_frozen_lake", ("solve_lake",)),
    Entry("RoomKeyDoor", "where key and door are, from one trial to the next", "05_dark_key_door", ("solve_room",)),
    Entry("TMazePassive", "one bit, from the first step to the last", "04_tmaze", ("solve_tmaze", "tmaze", "tmaze_transformer", "tmaze_1000", "tmaze_mamba", "tmaze_10k")),
    Entry("TMazeActive", "one bit, which must first be looked for", "04_tmaze"),
    Entry("SymbolicAlchemy", "what this chemistry's potions do, from one trial to the next", "06_alchemy", ("alchemy", "alchemy_by_colour")),
    Entry("MazeRunner", "where the ways of a maze lead, and what actions do", "13_mazerunner_relabeling", ("mazerunner",)),
    Entry("POPGymGame", "48 small games of cards, boards, bandits, poles and mazes", "03_popgym_suite",
          ("popgym", "popgym_cartpole", "popgym_long"), "popgym_envs", "popgym"),
    Entry("MultiDomainPOPGym", "27 of these games, one of them in each rollout", "03_popgym_suite", ("popgym",), "popgym_envs", "popgym"),
    Entry("GymnaxCompatibility", "hundreds of environments in one call of jax", "02_gymnax", ("gymnax",), "gymnax_envs", "gymnax"),
    Entry("XLandMiniGrid", "hidden goals and rules in a small world, from one attempt to the next", "11_xland_minigrid", ("xland",),
          "xland_minigrid", "xland"),
    Entry("HalfCheetahVel", "a hidden target velocity", "12_half_cheetah_vel", ("half_cheetah_vel", "half_cheetah_vel_wide"),
          "half_cheetah_v4_vel", "mujoco"),
    Entry("MetaWorld", "hidden goals of a robot arm, from one attempt to the next", "07_metaworld", ("metaworld", "metaworld_ml45"),
          "metaworld_ml", "metaworld"),
    Entry("MultitaskMetaBabyAI", "rooms and things of a mission in words, from one attempt to the next", "10_babyai", ("babyai",),
          "babyai", "minigrid"),
    Entry("CrafterInstructions", "an open world, with up to five goals in a row", "16_crafter_instructions", ("crafter", "crafter_long"),
          "crafter", "crafter"),
    Entry("AtariGame", "what moves, from picture to picture", "08_ale", ("ale", "atari_multigame"), "ale_retro", "atari"),
    Entry("TwoAttemptMTProcgen", "16 games with generated levels, two attempts at each level", "09_multitask_procgen", ("procgen",),
          "procgen_envs", "procgen"),
    Entry("RetroArcade", "games of many consoles through emulators", "17_retro_arcade", ("retro",), "ale_retro", "retro"),
)  # fmt: skip
"""The built-in environments, those without an extra first, each group in the order of its page."""
