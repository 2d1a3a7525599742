"""``amago doctor``: examine this machine and installation, a run, or the difference between two runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from amago import __version__
from amago.cli.lists import EXTRAS, missing, unmet
from amago.describe import fit_width, flatten, format_value
from amago.envs.pool.subprocess import usable_cores
from amago.run import checkpoint
from amago.run.callbacks import LogRow
from amago.run.checkpoint import CheckpointError
from amago.run.plots import read_metrics
from amago.run.record import SETTINGS_FILE, read_record
from amago.run.rules import findings

Finding = tuple[str, str, str, str]
"""What was examined; "ok", "note" (it could be better, or is missing that not every run needs) or "PROBLEM"; words; advice."""
_OF_EVERY_RUN = ("run_name", "ckpt_base_dir", "resume", "overwrite")  # differ without meaning


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Without RUN, examine this machine and this installation: versions, processor, memory, disk, GPUs, and the extras of --need ('amago "
        "list extras' shows all). With one RUN, examine its training states and its log. With two, print the settings in which they differ: fields, "
        "parameters, versions, git commit and machine. Nothing is changed, and nothing is sent. Exit code: 0 nothing is wrong or differs, 1 "
        "something is, 2 there is no record to compare. Example: amago doctor --need report video"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directory of a run; two are compared")
    parser.add_argument("--need", nargs="+", default=[], metavar="EXTRA", help="extras that must be there")
    parser.add_argument("--dir", type=Path, default=Path(), help="where runs will be: its disk is examined")


def run(args: Namespace) -> int:
    if len(args.runs) == 2:
        return _compare(*args.runs)
    if len(args.runs) > 2:
        raise ValueError(f"give one RUN, or two to compare, not {len(args.runs)}")
    examined = _training_states(args.runs[0]) if args.runs else _machine(args.dir)
    found = [*examined, *map(_extra, args.need)]
    for name, state, words, advice in found:
        print(fit_width(f"{state:<8} {name:<18} {words}", hang=28))
        if advice and state != "ok":
            print(fit_width(f"{'':<27} -> {advice}", hang=31))
    problems = sum(state == "PROBLEM" for _, state, _, _ in found)
    print(f"\n{problems} problems" if problems else "\nNothing is wrong.")
    return 1 if problems else 0


def _machine(directory: Path) -> Iterator[Finding]:
    """Versions of the packages that every run needs, processor, memory, disk and GPUs."""
    import torch

    yield "Python", "ok", f"{platform.python_version()} ({sys.executable})", ""
    yield "amago", "ok", f"{__version__} ({Path(__file__).parents[1]})", ""
    for requirement in importlib.metadata.requires("amago") or []:
        if "extra ==" not in requirement:
            lacks, name = unmet(requirement), Requirement(requirement).name
            yield name, "PROBLEM" if lacks else "ok", "; ".join(lacks) or "fits", f"pip install '{requirement}'"
    cores, threads = usable_cores(), torch.get_num_threads()
    yield "processor", "ok", f"{cores} cores usable of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}", ""
    poor = "note" if threads > cores else "ok"
    yield "threads", poor, f"PyTorch computes with {threads}", f"export OMP_NUM_THREADS={cores}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "main memory", "ok", f"{memory / 1e9:.1f} GB", ""
    if os.path.isdir("/dev/shm"):  # actors in worker processes share their observations through it
        size = shutil.disk_usage("/dev/shm").total
        poor = "note" if size < 256e6 else "ok"
        yield "shared memory", poor, f"{size / 1e6:,.0f} MB", "docker run --shm-size=1g, or --env_mode sync"
    yield _disk(next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists()))
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield f"cuda:{i}", "ok", f"{p.name}, {p.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}", ""
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        words = "there is a driver of NVIDIA, but PyTorch cannot use it" if driver else "none: everything computes on the CPU"
        yield "GPU", "note" if driver else "ok", words, "install a PyTorch for the driver's version, which nvidia-smi shows"


def _disk(place: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as err:
        return "disk", "PROBLEM", f"{place} cannot be written to: {err.strerror}", "--dir DIR: a place that can"
    advice = "a replay buffer may take more: --dset_max_bytes limits it"
    return "disk", "note" if free < 5e9 else "ok", f"{free / 1e9:.1f} GB free", advice


def _extra(name: str) -> Finding:
    lacks = missing(name)
    words = ": ".join(filter(None, (EXTRAS[name], ", ".join(what for what, _ in lacks))))
    return name, "PROBLEM" if lacks else "ok", words, "; ".join(dict.fromkeys(command for _, command in lacks))


# ---- runs ------------------------------------------------------------------------------------------------------------------


def _training_states(run_dir: Path) -> Iterator[Finding]:
    """The record of a run's settings, and its training states."""
    record = _record(run_dir)
    newest = record["starts"][-1].get("time", "?")
    yield "settings", "ok", f"{len(record['starts'])} starts, the newest at {newest}", ""
    states = checkpoint.training_states(run_dir / "ckpts" / "training_states")
    if not states:
        yield "training states", "note", "none", "a run that ends now begins anew: --ckpt_interval"
    for state in states:
        try:
            checkpoint.verify(state)
            yield state.name, "ok", "complete", ""
        except CheckpointError as err:
            yield state.name, "PROBLEM", str(err), "resume='auto' takes the newest complete one"
    if (run_dir / "metrics.jsonl").is_file():
        for name, words, advice in findings([LogRow(**row) for row in read_metrics(run_dir)]):
            yield name, "note", words, f"{advice} (docs/common_mistakes.md)"


def _record(run_dir: Path) -> dict[str, Any]:
    record = read_record(run_dir.expanduser())
    if record is None or not record["starts"]:
        raise CheckpointError(f"{run_dir} has no record of its settings ({SETTINGS_FILE}): give the directory of a run")
    return record


def _compare(first: Path, second: Path) -> int:
    """Print the settings in which two runs differ, "name: value -> value"."""
    before, now = _comparable(_record(first)), _comparable(_record(second))
    differing = [name for name in before | now if before.get(name, "(none)") != now.get(name, "(none)")]
    for name in differing:
        print(f"{name}: {format_value(before.get(name, '(none)'))} -> {format_value(now.get(name, '(none)'))}")
    return 1 if differing else 0


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run by name, without its own name and place."""
    fields = record["fields"]
    found: dict[str, Any] = {"experiment": record["experiment"]}
    for name, value in fields.items():
        found |= {} if name in _OF_EVERY_RUN else flatten(value, name)
    for name, whole in (("dset_root", "ckpt_base_dir"), ("dset_name", "run_name")):
        found |= {own: f"({whole})" for own in (name, f"dataset.{name}") if found.get(own) == fields[whole]}
    found |= {k: v for k, v in record["parameters"].items() if k not in record["unused"]}
    for part in ("versions", "git", "machine"):
        found |= flatten(record["starts"][-1][part], part)
    found.pop("machine.host", None)
    return found
