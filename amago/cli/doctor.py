"""``amago doctor``: examine this machine and installation, a run, or the difference between two runs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from amago import __version__
from amago.cli.lists import EXTRAS, missing, unmet
from amago.describe import fit_width, flatten, format_value
from amago.envs.pool.subprocess import usable_cores
from amago.run import checkpoint
from amago.run.checkpoint import CheckpointError
from amago.run.record import SETTINGS_FILE, read_record

_OF_EVERY_RUN = ("run_name", "ckpt_base_dir", "resume", "overwrite")  # differ without meaning


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        name: what was examined.
        state: "ok", "note" (something could be better, or is missing that not every run needs) or "problem".
        found: in words.
        advice: what to do; a command where there is one.
    """

    name: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Without RUN, examine this machine and this installation: versions, processor, memory, disk, GPUs, and the extras of --need ('amago "
        "list extras' shows all). With one RUN, examine its training states. With two, print the settings in which they differ: fields, "
        "parameters, versions, git commit and machine. Nothing is changed, and nothing is sent. Exit code: 0 nothing is wrong or differs, 1 "
        "something is, 2 there is no record to compare. Example: amago doctor --need report video"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directory of a run; two are compared")
    parser.add_argument("--need", nargs="+", default=[], metavar="EXTRA", help="extras that must be there")
    parser.add_argument("--dir", type=Path, default=Path(), help="where runs will be: its disk is examined")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    if len(args.runs) == 2:
        return _compare(*args.runs)
    if len(args.runs) > 2:
        raise ValueError(f"give one RUN, or two to compare, not {len(args.runs)}")
    examined = _training_states(args.runs[0]) if args.runs else _machine(args.dir)
    found = [*examined, *map(_extra, args.need)]
    problems = sum(f.state == "problem" for f in found)
    if args.json:
        print(json.dumps({"problems": problems, "findings": [f._asdict() for f in found]}, indent=1))
        return 1 if problems else 0
    for f in found:
        print(fit_width(f"{f.state.upper() if f.state == 'problem' else f.state:<8} {f.name:<18} {f.found}", hang=28))
        if f.advice:
            print(fit_width(f"{'':<27} -> {f.advice}", hang=31))
    print(f"\n{problems} problems" if problems else "\nNothing is wrong.")
    return 1 if problems else 0


# ---- this machine ----------------------------------------------------------------------------------------------------------


def _machine(directory: Path) -> Iterator[Finding]:
    """Versions of the packages that every run needs, processor, memory, disk and GPUs."""
    import torch

    yield Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("amago", "ok", f"{__version__} ({Path(__file__).parents[1]})")
    for requirement in importlib.metadata.requires("amago") or []:
        if "extra ==" not in requirement:
            lacks = unmet(requirement)
            advice = f"pip install '{requirement}'" if lacks else ""
            yield Finding(Requirement(requirement).name, "problem" if lacks else "ok", "; ".join(lacks) or "fits", advice)
    cores, threads = usable_cores(), torch.get_num_threads()
    yield Finding("processor", "ok", f"{cores} cores usable of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    yield _noted("threads", threads > cores, f"PyTorch computes with {threads}", f"export OMP_NUM_THREADS={cores}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("main memory", "ok", f"{memory / 1e9:.1f} GB")
    shm = Path("/dev/shm")  # actors in worker processes share their observations through it
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        yield _noted("shared memory", size < 256e6, f"{size / 1e6:,.0f} MB", "docker run --shm-size=1g, or --env_mode sync")
    yield _disk(next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists()))
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield Finding(f"cuda:{i}", "ok", f"{p.name}, {p.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}")
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        found = "there is a driver of NVIDIA, but PyTorch cannot use it" if driver else "none: everything computes on the CPU"
        yield _noted("GPU", driver, found, "install a PyTorch for the driver's version, which nvidia-smi shows")


def _noted(name: str, poor: bool, found: str, advice: str) -> Finding:
    return Finding(name, "note", found, advice) if poor else Finding(name, "ok", found)


def _disk(place: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=place) as f:
            began = time.perf_counter()
            f.write(os.urandom(2**24))
            f.flush()
            os.fsync(f.fileno())
            speed = 2**24 / (time.perf_counter() - began)
    except OSError as err:
        return Finding("disk", "problem", f"{place} cannot be written to: {err.strerror}", "--dir DIR: a place that can")
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free, {speed / 1e6:,.0f} MB/s"
    return _noted("disk", free < 5e9, found, "a replay buffer may take more: --dset_max_bytes limits it")


def _extra(name: str) -> Finding:
    lacks = missing(name)
    advice = "; ".join(dict.fromkeys(command for _, command in lacks))
    found = f"{EXTRAS[name]}: {', '.join(what for what, _ in lacks)}" if lacks else EXTRAS[name]
    return Finding(name, "problem" if lacks else "ok", found, advice)


# ---- runs ------------------------------------------------------------------------------------------------------------------


def _training_states(run_dir: Path) -> Iterator[Finding]:
    """The record of a run's settings, and its training states."""
    record = _record(run_dir)
    yield Finding("settings", "ok", f"{len(record['starts'])} starts, the newest at {record['starts'][-1].get('time', '?')}")
    states = checkpoint.training_states(run_dir / "ckpts" / "training_states")
    if not states:
        yield Finding("training states", "note", "none", "a run that ends now begins anew: --ckpt_interval")
    for state in states:
        try:
            checkpoint.verify(state)
            yield Finding(state.name, "ok", "complete")
        except CheckpointError as err:
            yield Finding(state.name, "problem", str(err), "resume='auto' takes the newest complete one")


def _record(run_dir: Path) -> dict[str, Any]:
    record = read_record(run_dir.expanduser())
    if record is None or not record["starts"]:
        raise CheckpointError(f"{run_dir} has no record of its settings ({SETTINGS_FILE}): give the directory of a run")
    return record


def _compare(first: Path, second: Path) -> int:
    """Print the settings in which two runs differ, "name: value -> value"."""
    before, now = _comparable(_record(first)), _comparable(_record(second))
    pairs = {name: (before.get(name, "(none)"), now.get(name, "(none)")) for name in (before | now)}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for name, (a, b) in differing.items():
        print(f"{name}: {format_value(a)} -> {format_value(b)}")
    return 1 if differing else 0


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run by name, without its own name and place."""
    fields = record["fields"]
    found: dict[str, Any] = {"experiment": record["experiment"]}
    for name, value in fields.items():
        found |= {} if name in _OF_EVERY_RUN else flatten(value, name)
    for field, whole in (("dset_root", "ckpt_base_dir"), ("dset_name", "run_name")):
        for name in (field, f"dataset.{field}"):
            if found.get(name) == fields[whole]:
                found[name] = f"({whole})"
    found |= {k: v for k, v in record["parameters"].items() if k not in record["unused"]}
    for part in ("versions", "git", "machine"):
        found |= flatten(record["starts"][-1][part], part)
    found.pop("machine.host", None)
    return found
