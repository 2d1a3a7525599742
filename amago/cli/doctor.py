"""``amago doctor``: this machine and this installation."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from amago.cli.checkup import Finding, checkup
from amago.cli.extras import EXTRAS, missing
from amago.run.layout import fitted

MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Look at this machine and this installation: versions, processor, threads, memory, speed of the disk, GPUs, and the extras: what is missing "
        "for what, each with the command that brings it. Nothing is changed, and nothing is sent. The exit code is 1 if something that "
        "every run needs is wrong, or an extra of --need is missing; else 0. Example: amago doctor --need report video"
    )
    parser.add_argument(
        "--need", nargs="+", default=[], metavar="EXTRA", help=f"extras that must be there: {', '.join(EXTRAS)}"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where runs will be: its disk is measured, with 64 MB that are deleted again"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    lacks = {name: missing(name) for name in EXTRAS}
    unknown = [name for name in args.need if name not in EXTRAS]
    if unknown:
        raise ValueError(f"--need: there is no extra {', '.join(unknown)}; the extras are {', '.join(EXTRAS)}")
    found = checkup(args.dir) + [_of_extra(name, name in args.need) for name in EXTRAS]
    ill = [f for f in found if f.state == "problem"]
    if args.json:
        print(json.dumps({"problems": len(ill), "findings": [asdict(f) for f in found], "missing": {
            name: [asdict(lack) for lack in of] for name, of in lacks.items()
        }}, indent=1))  # fmt: skip
    else:
        print(_page(found))
        print(f"\n{len(ill)} problems" if ill else "\nNothing that every run needs is missing.")
    return 1 if ill else 0


def _of_extra(name: str, needed: bool) -> Finding:
    lacks, extra = missing(name), EXTRAS[name]
    if not lacks:
        return Finding("extras", name, "ok", extra.what_for)
    advice = "; ".join(dict.fromkeys(lack.command for lack in lacks))
    said = f"{extra.what_for}: {', '.join(lack.what for lack in lacks)}"
    return Finding("extras", name, "problem" if needed else "note", said, advice)


def _page(found: list[Finding]) -> str:
    wide = max(len(f.name) for f in found)
    lines: list[str] = []
    for i, f in enumerate(found):
        lines += [f"{'' if i == 0 else chr(10)}{f.section}"] if i == 0 or f.section != found[i - 1].section else []
        hang = wide + len(MARKS["ok"]) + 6
        lines += [fitted(f"  {MARKS[f.state]}  {f.name:<{wide}}  {f.said}", hang)]
        lines += [fitted(f"  {'':<7}  {'':<{wide}}  -> {f.advice}", hang + 3)] if f.advice else []
    return "\n".join(lines)
