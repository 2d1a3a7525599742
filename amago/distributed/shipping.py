"""What of the user's files reaches the nodes of a cluster: the script, what lies beside it, and files named in its arguments."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

_SENT = "runtime_resources"  # the directory of Ray's session for what it was sent
MOST_BYTES = 100 << 20
"""Most bytes of a program's files."""
_ENDINGS = (".pyc", ".safetensors", ".pt", ".ckpt", ".log", ".jsonl")
_NAMES = {"__pycache__", "wandb", "node_modules", "build", "dist", "site-packages"}
_SIGNS = ("pyvenv.cfg", "ckpts", "buffer", "settings.json")
"""A directory that has one of these is a virtual environment, a run, or a replay buffer."""


def pack(program: Sequence[str], target: Path) -> list[str]:
    """Copy the files of a program into a directory, from which it can be run as from the current one.

    These are the files in the script's directory and below (of a module: in the current directory and below), and files in the
    current directory and below that an argument names. Left out are hidden files, virtual environments, runs and buffers, checkpoints,
    logs, and the directories ``__pycache__``, ``wandb``, ``node_modules``, ``build`` and ``dist``.

    Args:
        program: as of `amago.distributed.launcher.Plan`.
        target: receives the files.

    Returns:
        the program, as it is to be called in ``target``.

    Raises:
        ValueError: the files have more than 100 MB; the message names the largest.
    """
    here = Path.cwd()
    words, files = list(program), dict(_arguments(program, here))
    if program[0] != "-m":
        script = Path(program[0]).absolute()
        inside = script.is_relative_to(here)
        root = here if inside else script.parent
        words[0] = str(script.relative_to(root))
        files |= {path: path.relative_to(root) for path in _below(script.parent)}
        files[script] = script.relative_to(root)
    elif _is_own(program[1], here):
        files |= {path: path.relative_to(here) for path in _below(here)}
    _check_size(files)
    for source, name in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name)
    return words


def pack_library(target: Path) -> Path | None:
    """Copy this library, if it is that of a checkout, which the nodes do not have; None if it is installed.

    Args:
        target: directory that receives the package.
    """
    package = Path(__file__).resolve().parent.parent
    if any(package.is_relative_to(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib")):
        return None
    shutil.copytree(package, target / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    return target / package.name


def keep(target: Path) -> None:
    """Copy what Ray has sent to this process, go there, and import from there, here and in processes that start from now on.

    Ray deletes what it has sent when it takes it for unused: among nodes that share a machine, as soon as one of them ends.

    Args:
        target: directory for the copies; replaced.
    """
    here = Path.cwd()
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sent = dict.fromkeys([here, *(Path(entry) for entry in entries if _SENT in Path(entry).parts)])
    shutil.rmtree(target, ignore_errors=True)
    copies = {str(source): str(shutil.copytree(source, target / str(i))) for i, source in enumerate(sent)}
    os.environ["PYTHONPATH"] = os.pathsep.join(copies.get(entry, entry) for entry in entries)
    sys.path[:] = [copies.get(entry, entry) for entry in sys.path]
    os.chdir(copies[str(here)])


def _is_own(module: str, here: Path) -> bool:
    """Whether a module lies in the current directory, rather than being installed."""
    top = module.partition(".")[0]
    return top != __name__.partition(".")[0] and ((here / top).is_dir() or (here / f"{top}.py").is_file())


def _arguments(program: Sequence[str], here: Path) -> Iterator[tuple[Path, Path]]:
    """Files in the current directory and below that arguments name, as "FILE" or "--option=FILE", and their places."""
    for word in program[1:]:
        path = Path(os.path.abspath(word.partition("=")[2] if word.startswith("-") else word))
        if path.is_relative_to(here) and path.is_file():
            yield path, path.relative_to(here)


def _below(directory: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(directory):
        at = Path(root)
        folders[:] = [f for f in folders if not f.startswith(".") and f not in _NAMES and not _is_no_source(at / f)]
        yield from (at / n for n in names if not n.startswith(".") and not n.endswith(_ENDINGS) and (at / n).is_file())


def _is_no_source(directory: Path) -> bool:
    return any((directory / sign).exists() for sign in _SIGNS) or directory.name.endswith(".egg-info")


def _check_size(files: dict[Path, Path]) -> None:
    sizes = {name: path.stat().st_size for path, name in files.items()}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
        raise ValueError(
            f"the files of the program have {total / 1e6:,.0f} MB, and at most {MOST_BYTES / 1e6:.0f} MB are sent to the nodes of a cluster; the "
            f"largest are {shown}: put the script into a directory of its own, and data where each node finds them"
        )
