"""The state of this process: random streams, all that environments in it may change ("sync" and "already_vectorized"), and its allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from amago.run.group import SIGNALS


def draw_seed() -> int:
    """A seed from the operating system."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def seed_process(key: tuple[int, ...]) -> None:
    """Seed the generators of PyTorch, NumPy and Python from one key."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence(key).generate_state(3).tolist()
    torch.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


def rng_state() -> dict[str, Any]:
    """The state of these generators and of CUDA's, as JSON types."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, pos, has_gauss, gauss = legacy
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [name, keys.tolist(), int(pos), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        state["cuda"] = [s.tolist() for s in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state from `rng_state`. Streams of CUDA are restored if the number of GPUs is the same."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    name, keys, pos, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), pos, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in state["cuda"]])


# ---- environments in the process of the run -------------------------------------------------------------------------------

_OTHER = 0x5DEECE66D  # other random numbers for environments than the policy's


def _generators() -> list[torch.Generator]:
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *on_gpus]


def _set_generators(states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), states):
        generator.set_state(state)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


def _set_directory(path: str) -> None:
    with contextlib.suppress(OSError):  # it may be deleted by now; the run's own paths are absolute
        os.chdir(path)


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # also makes modules look at the filters again
    warnings.filters.extend(filters)  # type: ignore[attr-defined]  # a list, which only the stubs call a sequence


def _set_variables(wanted: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(wanted)


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


_SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # how each is read, and set
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_device),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "torch": (lambda: [generator.get_state() for generator in _generators()], _set_generators),
    "numpy": (np.random.get_state, np.random.set_state),
    "random": (random.getstate, random.setstate),
    "floating-point errors": (np.geterr, lambda kept: np.seterr(**kept)),
    "warnings": (lambda: list(warnings.filters), _set_filters),
    "directory": (_directory, _set_directory),
    "environment variables": (lambda: dict(os.environ), _set_variables),
}
_RANDOM = ("torch", "numpy", "random")  # which change with each use, and are not compared


def _read() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SHARED.items()}


def _put(state: dict[str, Any]) -> None:
    for name, (read, put) in _SHARED.items():
        if name in _RANDOM or read() != state[name]:
            put(state[name])


class SharedProcess:
    """Separates the process state that environments change from the state for the run's own work; signal handlers do not change."""

    def __init__(self) -> None:
        self._own: dict[str, Any] | None = None  # inside `environments`: the state for the run's own work
        self._theirs: dict[str, Any] | None = None  # outside: the state for environments
        self._look_at = 0.0  # for handlers that environments have set

    @contextlib.contextmanager
    def environments(self) -> Iterator[None]:
        """A block in which environments are made, reset, stepped and closed."""
        if self._own is not None:
            yield
            return
        self._own, self._handlers = _read(), {number: signal.getsignal(number) for number in SIGNALS}
        self._generators = _generators()
        if self._theirs is not None:
            _put(self._theirs)
        else:
            torch.default_generator.manual_seed(torch.initial_seed() ^ _OTHER)
        try:
            yield
        finally:
            self._theirs = _read()
            _put(self._own)
            self._own = None
            self._keep_handlers()

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """Inside a block of `environments`: the policy computes. A step has such a block, which therefore costs few calls."""
        assert self._own is not None
        dtype, own = torch.get_default_dtype(), self._own["default dtype"]
        self._exchange_generators(self._own["torch"])
        if dtype is not own:
            torch.set_default_dtype(own)
        if time.monotonic() >= self._look_at:  # to look at handlers takes as long as all else here
            self._look_at = time.monotonic() + 0.2
            if any(signal.getsignal(number) is not handler for number, handler in self._handlers.items()):
                self._keep_handlers()
        try:
            yield
        finally:
            self._exchange_generators(self._own["torch"])
            if dtype is not own:
                torch.set_default_dtype(dtype)

    def _exchange_generators(self, states: list[torch.Tensor]) -> None:
        """Exchange the states of PyTorch's generators with these."""
        for i, generator in enumerate(self._generators):
            state, states[i] = states[i], generator.get_state()
            generator.set_state(state)

    def _keep_handlers(self) -> None:
        for number, handler in self._handlers.items() if threading.current_thread() is threading.main_thread() else ():
            if handler is not None:  # of a program in C
                signal.signal(number, handler)


# ---- the allocator ----------------------------------------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def keep_freed_memory(keep: bool) -> bool:
    """Let the process reuse the memory of freed tensors, or restore glibc's defaults (without the growth of the threshold that a new
    process has). Returns False where nothing changes, as there is no glibc.

    By default glibc returns freed blocks to the system, which clears each page again at its next use: 7.5 to 11% of an update
    of `Agent` with discrete actions (24 sequences of 128 timesteps, one core of an Intel Xeon with avx512, `benchmarks/learner.py`). Blocks
    of 32 MB and more are still returned, because keeping them fragments the heap.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has none
        return False
    mmap, trim = (2**25, 2**31 - 1) if keep else (128 * 1024, 128 * 1024)
    return bool(mallopt(_MMAP_THRESHOLD, mmap) and mallopt(_TRIM_THRESHOLD, trim))
