"""The extras of the package (``pip install 'amago[NAME]'``): what each is for, and what it lacks on this machine."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement


@dataclass(frozen=True)
class Extra:
    """One extra.

    Attributes:
        what_for: in a few words.
        requires: packages with their versions, as ``pyproject.toml`` has them (a test compares).
        programs: programs that must be on the path, {name: how to get it}.
        libraries: system libraries, {name: how to get it}.
    """

    what_for: str
    requires: tuple[str, ...]
    programs: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()


_MUJOCO = ("gymnasium[mujoco]", "mujoco>=3.3.0,<3.12")
EXTRAS: dict[str, Extra] = {
    "classic": Extra("CartPole, Pendulum and others in a window or filmed", ("gymnasium[classic-control]",)),
    "export": Extra("policies as ONNX files", ("onnx>=1.16", "onnxscript>=0.5", "onnxruntime>=1.18")),
    "hub": Extra("amago push, amago pull", ("huggingface_hub>=0.30",)),
    "offline": Extra("Minari and HDF5 data sets", ("minari[hdf5]>=0.5.4", "pillow", "h5py>=3.10")),
    "plots": Extra("pictures: amago demo, amago eval --memory", ("matplotlib>=3.7",)),
    "ray": Extra("--ray: collectors on many machines", ("ray>=2.40",)),
    "report": Extra("amago report, amago watch", ("plotly>=6",)),
    "tensorboard": Extra("--tensorboard", ("tensorboard>=2.14",)),
    "tune": Extra("amago tune", ("optuna>=4",)),
    "video": Extra("films as MP4: amago eval --video, --video-interval, cards (GIF needs Pillow alone)", ("moviepy>=2", "pillow")),
    "wandb": Extra("--log: Weights & Biases", ("wandb>=0.20",)),
    "mujoco": Extra("HalfCheetahVel, and Gymnasium's MuJoCo environments", _MUJOCO),
    "dmc": Extra("DeepMind Control", (*_MUJOCO, "shimmy>=2.0.1", "dm-control>=1.0.28")),
    "box2d": Extra("LunarLander and others of Gymnasium", ("gymnasium[box2d]",)),
    "metaworld": Extra("Meta-World", ("gymnasium[mujoco]", "metaworld==3.1.1", "packaging")),
    "popgym": Extra("POPGym", ("popgym>=1.0.7", "mazelib>=0.9.16")),
    "gymnax": Extra("gymnax", ("jax[cpu]>=0.6", "gymnax>=1.0.1", "six")),
    "xland": Extra("XLand-MiniGrid", ("jax[cpu]>=0.6", "xminigrid>=0.9.3")),
    "minigrid": Extra("BabyAI and MiniGrid", ("minigrid>=3.2",)),
    "atari": Extra("Atari", ("ale-py>=0.11", "opencv-python-headless>=4.10")),
    "crafter": Extra("Crafter", ("crafter>=1.8.3", "opensimplex>=0.4")),
    "retro": Extra("console games", ("stable-retro>=1.0.1", "opencv-python-headless>=4.10")),
    "pokemon": Extra(
        "Pokemon battles", ("poke-env>=0.16.1,<0.17",), programs=(("node", "apt-get install nodejs npm, then make showdown"),)
    ),
    "procgen": Extra(
        "Procgen", ("envpool>=1.2.5",), libraries=(("Qt5Gui", "apt-get install --no-install-recommends libqt5core5a libqt5gui5"),)
    ),
    "docs": Extra(
        "building the docs site", ("mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.29", "griffelib>=2")
    ),
}  # fmt: skip
"""The extras that something can be used with; ``envs`` and ``dev`` are made of these."""


@dataclass(frozen=True)
class Lack:
    """Something that is not there, and the command that brings it."""

    what: str
    command: str


def missing(name: str) -> list[Lack]:
    """What an extra lacks on this machine; nothing is imported.

    Raises:
        ValueError: there is no such extra.
    """
    if name not in EXTRAS:
        raise ValueError(f"there is no extra {name!r}; the extras are {', '.join(EXTRAS)}")
    extra = EXTRAS[name]
    install = f"pip install 'amago[{name}]'"
    found = [Lack(what, install) for what in dict.fromkeys(w for r in extra.requires for w in unmet(r))]
    found += [Lack(f"the program {p}", command) for p, command in extra.programs if shutil.which(p) is None]
    return found + [Lack(f"the library {lib}", c) for lib, c in extra.libraries if ctypes.util.find_library(lib) is None]


def unmet(requirement: str) -> list[str]:
    """What is missing of a requirement such as "gymnasium[box2d]>=1.0", its extras included: "NAME is not installed", "NAME 1.0 is
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
    for text in importlib.metadata.requires(r.name) or [] if r.extras else []:
        try:
            inner = Requirement(text)
        except InvalidRequirement:  # of another package, in a form of long ago
            continue
        marker = inner.marker
        if marker is not None and not marker.evaluate({"extra": ""}) and any(marker.evaluate({"extra": e}) for e in r.extras):
            yield from _unmet(inner)
