"""``amago list``: the built-in environments, the settings that come with the library, and its extras."""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.metadata
import re
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import NamedTuple

import yaml
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
    parser.add_argument("name", nargs="?", help="show this one alone, with everything that is known of it")


def run(args: Namespace) -> int:
    rows = {str(row["name"]).removeprefix("zoo/"): row for row in LISTS[args.what]()}
    if args.name is not None:
        given = args.name.lower().removeprefix("zoo/").removesuffix(".gin")
        known = {name.lower(): name for name in rows}
        if given not in known:
            raise ValueError(f"{args.what} has no {args.name!r}; {config.suggestion(args.name, rows)}")
        rows = {given: rows[known[given]]}
    for row in rows.values():
        shown = {k: ", ".join(v) if isinstance(v, list) else str(v) for k, v in row.items() if v}
        if args.name is None:
            print(fit_width(f"{shown.pop('name'):<20} {shown.pop('about')}"))
            for name in ("spaces", "example", "settings", "used by", "reached", "missing", "to install"):
                if name in shown:
                    print(fit_width(f"    {name}: {shown[name]}", hang=8))
        else:
            print(shown.get("gin") or "\n".join(fit_width(f"{name:<14} {value}", hang=15) for name, value in shown.items()))
    return 0


def environments() -> Iterator[Row]:
    """The built-in environments, those without an extra first."""
    for e in ENTRIES:
        module = f"amago.envs.builtin.{e.module}" if e.module else "amago.envs.builtin"
        row: Row = {
            "name": e.name, "environment": f"{module}:{e.name}", "about": e.about, "example": e.example and f"examples/{e.example}.py",
            "settings": [f"zoo/{z}" for z in e.zoo], "docs": f"docs/{'benchmarks' if e.extra else 'environments'}.md",
        }  # fmt: skip
        if e.extra is None:
            make = vars(importlib.import_module(module))[e.name]
            env = make(size=5) if e.name == "MetaFrozenLake" else make()
            yield row | {"spaces": f"{env.observation_space} -> {env.action_space}"}
        else:
            yield row | {"extra": e.extra} | _needs(e.extra)


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
_TABLES = yaml.safe_load(resources.files("amago.cli").joinpath("lists.yaml").read_text(encoding="utf-8"))
EXTRAS: dict[str, str] = _TABLES["extras"]
"""The purposes of the extras."""
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
    """A built-in environment, as ``lists.yaml`` describes it."""

    name: str
    about: str
    example: str | None = None
    zoo: Sequence[str] = ()
    module: str = ""
    extra: str | None = None


ENTRIES = [Entry(**row) for row in _TABLES["environments"]]
"""The built-in environments, those without an extra first, each group in the order of its page."""
