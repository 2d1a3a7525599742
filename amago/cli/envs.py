"""``amago envs``: all built-in environments."""

from __future__ import annotations

import difflib
import json
from argparse import ArgumentParser, Namespace
from typing import Any

from amago.cli.catalog import ENTRIES, Entry
from amago.cli.extras import missing
from amago.run.layout import fitted


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "List the built-in environments: what each is about, its spaces, the extra that it needs and whether that is installed, an example "
        "and settings. Environments are made to look at their spaces, with default arguments, if their extra is installed. "
        "Example: amago envs RoomKeyDoor"
    )
    parser.add_argument(
        "name", nargs="?", default=None, help="show this environment alone, with everything that is known of it"
    )
    parser.add_argument("--installed", action="store_true", help="leave out those whose extra is missing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    entries = ENTRIES if args.name is None else (_named(args.name),)
    found = [described(e) for e in entries]
    if args.installed:
        found = [d for d in found if d["installed"]]
    if args.json:
        print(json.dumps(found if args.name is None else found[:1], indent=1))
    elif args.name is not None:
        print(_all_of(found[0]) if found else f"{args.name} is not installed")
    else:
        print(_table(found))
    return 0


def _named(name: str) -> Entry:
    by_name = {e.name.lower(): e for e in ENTRIES}
    if name.lower() not in by_name:
        near = difflib.get_close_matches(name.lower(), by_name, n=3)
        names = [by_name[n].name for n in near] or [e.name for e in ENTRIES]
        raise ValueError(
            f"there is no built-in environment {name!r}; {'did you mean' if near else 'there are'} {', '.join(names)}"
        )
    return by_name[name.lower()]


def described(entry: Entry) -> dict[str, Any]:
    """An environment as JSON types: its entry, what is missing for it, and its spaces; or "problem", why they could not be read."""
    lacks = missing(entry.extra) if entry.extra is not None else []
    out: dict[str, Any] = {
        "name": entry.name, "module": entry.module, "about": entry.about, "extra": entry.extra, "installed": not lacks,
        "missing": [lack.what for lack in lacks], "install": list(dict.fromkeys(lack.command for lack in lacks)),
        "observation_space": None, "action_space": None, "horizon": None, "vectorized": entry.vectorized, "example": entry.example,
        "zoo": [f"zoo/{name}" for name in entry.zoo], "docs": entry.docs, "problem": None,
    }  # fmt: skip
    out["observation_space"], out["action_space"] = entry.spaces or (None, None)
    if entry.made and not lacks:
        try:
            out["observation_space"], out["action_space"], out["horizon"] = entry.look()
        except Exception as err:  # of any package behind it: the others are listed nevertheless
            out["problem"] = (str(err) or repr(err)).splitlines()[0]
    return out


def _table(found: list[dict[str, Any]]) -> str:
    lines = []
    for d in found:
        state = "" if d["extra"] is None else f"[{d['extra']}: {'installed' if d['installed'] else 'not installed'}]"
        lines += [f"{d['name']:<20} {d['about']} {state}".rstrip()]
        lines += (
            [f"{'':<20}   {_short(d['observation_space'])} -> {_short(d['action_space'])}"] if d["observation_space"] else []
        )
        lines += [f"{'':<20}   cannot be made: {d['problem']}"] if d["problem"] else []
        where = ", ".join(filter(None, [d["example"], *d["zoo"]]))
        lines += [f"{'':<20}   {where}"] if where else []
    absent = sorted({d["extra"] for d in found if not d["installed"]})
    if absent:
        lines += [
            "",
            f"for those that are not installed: pip install 'amago[{','.join(absent)}]' (amago doctor says what each needs)",
        ]
    return "\n".join(
        [
            *(fitted(line, hang=25) for line in lines),
            "",
            "amago envs NAME says more; amago train takes module:function for what makes one.",
        ]
    )


def _short(space: str) -> str:
    """A space in one line, without long bounds."""
    text = " ".join(space.split())
    return text if len(text) <= 110 else f"{text[:107]}..."


def _all_of(d: dict[str, Any]) -> str:
    horizon = f"{d['horizon']:,} steps" if d["horizon"] else None
    rows = {
        "environment": f"{d['module']}:{d['name']}", "about": d["about"], "observations": d["observation_space"],
        "actions": d["action_space"], "rollouts, at most": horizon, "extra": d["extra"],
        "installed": ("yes" if d["installed"] else f"no: {'; '.join(d['missing'])}") if d["extra"] else None,
        "to install": "; ".join(d["install"]) or None, "cannot be made": d["problem"], "example": d["example"],
        "settings": ", ".join(d["zoo"]) or None, "docs": d["docs"],
    }  # fmt: skip
    return "\n".join(fitted(f"{name:<18} {' '.join(value.split())}", hang=19) for name, value in rows.items() if value)
