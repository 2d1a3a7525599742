"""``amago zoo``: the settings that come with the library, and what they reached."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

from amago import config
from amago.run.layout import fitted

_HEAD = re.compile(r"# (Task|Used by|Reached): (.+)")


@dataclass(frozen=True)
class Settings:
    """One file of the zoo, from the first lines of the file, which a test compares with the docs.

    Attributes:
        name: for ``--configs``: "zoo/NAME".
        task: what they are for.
        used_by: the command or the example that they belong to.
        reached: scores, each with the page and the row that hold them; or that nothing was measured.
        about: the rest of the comment at the top of the file.
        path: the file.
    """

    name: str
    task: str
    used_by: str
    reached: tuple[str, ...]
    about: str
    path: str


def read_settings(name: str, path: Path) -> Settings:
    """What the head of a file of the zoo says.

    Raises:
        ValueError: it lacks a line that every file has.
    """
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line)
    heads = [found.groups() for found in map(_HEAD.fullmatch, comment) if found]
    of = {key: [value for k, value in heads if k == key] for key in ("Task", "Used by", "Reached")}
    missing = [key for key, values in of.items() if not values]
    if missing:
        raise ValueError(f"{path} lacks the lines {', '.join(f'# {k}: ...' for k in missing)} at its top")
    about = " ".join(line.removeprefix("#").strip() for line in comment if not _HEAD.fullmatch(line)).strip()
    return Settings(name, of["Task"][0], of["Used by"][0], tuple(of["Reached"]), about, str(path))


def all_settings() -> list[Settings]:
    """All of the zoo, by name."""
    return [read_settings(name, path) for name, path in config.zoo_files().items()]


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "List the settings that come with the library: gin files for '--configs zoo/NAME', for what task each is, and what it reached. "
        "Example: amago zoo cartpole, then amago train CartPole-v1 --configs zoo/cartpole ..."
    )
    parser.add_argument("name", nargs="?", default=None, help="show this file, instead of the list")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    if args.name is None:
        found = all_settings()
        print(json.dumps([asdict(s) for s in found], indent=1) if args.json else _table(found))
        return 0
    name = f"zoo/{args.name.removeprefix('zoo/').removesuffix('.gin')}"
    settings = read_settings(name, config.zoo_file(name))
    text = Path(settings.path).read_text(encoding="utf-8")
    print(
        json.dumps(asdict(settings) | {"gin": text}, indent=1) if args.json else f"# {settings.path}\n{text}",
        end="\n" if args.json else "",
    )
    return 0


def _table(found: list[Settings]) -> str:
    wide = max(len(s.name) for s in found)
    lines = []
    for s in found:
        lines += [f"{s.name:<{wide}}  {s.task} ({s.used_by})"]
        lines += [f"{'':<{wide}}    reached: {r}" for r in s.reached if r != "not measured"]
    measured = sum("not measured" not in s.reached for s in found)
    return "\n".join(
        [
            *(fitted(line, hang=wide + 6) for line in lines),
            "",
            fitted(
                f"{len(found)} settings; what {len(found) - measured} of them reach was not measured. amago zoo NAME shows a file."
            ),
        ]
    )
