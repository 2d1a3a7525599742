"""What `amago doctor` looks at. Each check says what it found, and never raises."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from amago import __version__
from amago.cli.extras import unmet

NEEDS = ("torch>=2.5", "numpy>=1.26", "gymnasium>=1.0", "accelerate>=1.0", "gin-config>=0.5", "safetensors>=0.4.5", "cloudpickle>=3.0",
         "tqdm>=4.65")  # fmt: skip
"""The packages that every run needs, as ``pyproject.toml`` has them (a test compares)."""
PYTHON = ">=3.10,<3.14"
PROBE = 64 * 2**20
"""Bytes that are written to measure a disk."""
SLOW_DISK, FEW_FREE, SMALL_SHM, FEW_FILES = 50e6, 5e9, 256e6, 1024
"""Bytes a second; bytes on the disk of the runs; bytes of shared memory; open files. Below these there is a note."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: heading.
        name: what was looked at.
        state: "ok", "note" (something could be better, or is missing that not every run needs) or "problem".
        said: what was found.
        advice: what to do; a command where there is one.
    """

    section: str
    name: str
    state: str
    said: str
    advice: str = ""


def checkup(directory: Path) -> list[Finding]:
    """Look at everything; ``directory`` is where runs will be."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", _versions), ("processor", _processor), ("memory", _memory), ("disk", lambda: _disk(directory)), ("GPU", _gpu),
    ]  # fmt: skip
    found = []
    for section, check in checks:
        try:
            found += list(check())
        except Exception as err:  # what cannot be looked at is a finding, too
            found += [Finding(section, section, "problem", f"could not be examined: {err!r}")]
    return found


def _versions() -> Iterator[Finding]:
    fits = SpecifierSet(PYTHON).contains(platform.python_version(), prereleases=True)
    advice = "" if fits else f"install a Python {PYTHON}, and amago into it"
    said = f"{platform.python_version()} ({sys.executable})"
    yield Finding("versions", "Python", "ok" if fits else "problem", said, advice)
    yield Finding("versions", "amago", "ok", f"{__version__} ({Path(__file__).parents[1]})")
    for requirement in NEEDS:
        name, lacks = Requirement(requirement).name, unmet(requirement)
        if lacks:
            yield Finding("versions", name, "problem", "; ".join(lacks), f"pip install '{requirement}'")
        else:
            yield Finding("versions", name, "ok", importlib.metadata.version(name))
    if not unmet(NEEDS[0]):
        yield from _computes("cpu", "torch on the CPU", "pip install --force-reinstall torch", "versions")


def _computes(device: str, name: str, advice: str, section: str) -> Iterator[Finding]:
    """Whether PyTorch multiplies two matrices there, and how fast."""
    try:
        import torch

        a = torch.ones(1024, 1024, device=device)
        right = bool(((a @ a) == 1024).all())  # also the first one, which is slow
        began, count = time.perf_counter(), 0
        while count < 3 or (time.perf_counter() - began < 0.2 and count < 1000):
            b = a @ a
            count += 1
        right = right and bool((b == 1024).all())  # waits until a GPU is done
        speed = 2 * 1024**3 * count / (time.perf_counter() - began)
    except Exception as err:
        yield Finding(section, name, "problem", f"does not compute: {_line(err)}", advice)
        return
    if right:
        yield Finding(section, name, "ok", f"{speed / 1e9:,.0f} GFLOP/s (products of float32 matrices, 1024 x 1024)")
    else:
        yield Finding(section, name, "problem", "computes wrong products of matrices", advice)


def _line(err: BaseException) -> str:
    return (str(err) or repr(err)).splitlines()[0]


# ---- processor -------------------------------------------------------------------------------------------------------------


def usable_cores() -> float:
    """Cores that this process may use: its affinity, and the limit of its container."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, float(quota) / float(period))
    return cores


def _processor() -> Iterator[Finding]:
    yield Finding(
        "processor", "CPU", "ok", f"{_cpu_name() or platform.machine()}, {usable_cores():g} cores usable of {os.cpu_count()}"
    )
    try:
        import torch
    except Exception:  # reported under versions
        return
    capability = torch.backends.cpu.get_cpu_capability()
    flags = _cpu_flags()
    extra = [label for flag, label in (("avx512_bf16", "bfloat16"), ("amx_bf16", "AMX")) if flag in flags]
    slow = capability in ("DEFAULT", "NO AVX") and platform.machine() in ("x86_64", "AMD64")
    advice = "without AVX2 updates take several times as long; another machine, or a GPU" if slow else ""
    yield Finding("processor", "instructions", "note" if slow else "ok", ", ".join([capability, *extra]), advice)
    yield _threads(torch.get_num_threads(), usable_cores())
    yield from _load(usable_cores())


def _threads(threads: int, cores: float) -> Finding:
    said = f"PyTorch computes with {threads}; OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if threads > max(1.0, cores):
        return Finding(
            "processor", "threads", "note", f"{said}, with {cores:g} cores", f"export OMP_NUM_THREADS={max(1, int(cores))}"
        )
    return Finding("processor", "threads", "ok", said)


def _load(cores: float) -> Iterator[Finding]:
    with contextlib.suppress(OSError, AttributeError):
        load = os.getloadavg()[0]
        busy = load > cores
        advice = (
            f"other work takes cores: fewer actors or threads (OMP_NUM_THREADS={max(1, int(cores // 2))}) may be faster"
            if busy
            else ""
        )
        yield Finding(
            "processor", "load", "note" if busy else "ok", f"{load:.1f} processes want a core, in the last minute", advice
        )


def _cpu_info(key: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.partition(":")[0].strip() == key:
                return line.partition(":")[2].strip()
    return None


def _cpu_name() -> str | None:
    return _cpu_info("model name") or platform.processor() or None


def _cpu_flags() -> set[str]:
    return set((_cpu_info("flags") or "").split())


# ---- memory and limits -----------------------------------------------------------------------------------------------------


def _memory() -> Iterator[Finding]:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        total, free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _available()
        limit = _container_limit()
        said = (
            f"{_gb(total)}"
            + (f", {_gb(free)} available" if free else "")
            + (f"; this container may use {_gb(limit)}" if limit else "")
        )
        yield Finding("memory", "main memory", "ok", said)
    shm = Path("/dev/shm")  # actors in processes of their own share their observations through it
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        small = usage.total < SMALL_SHM
        advice = "docker run --shm-size=1g, or --env_mode sync" if small else ""
        yield Finding(
            "memory", "shared memory", "note" if small else "ok", f"{_gb(usage.free)} free of {_gb(usage.total)}", advice
        )
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = 0 <= soft < FEW_FILES
        said = f"{soft} a process" if soft != resource.RLIM_INFINITY else "no limit"
        yield Finding("memory", "open files", "note" if few else "ok", said, f"ulimit -n {FEW_FILES * 4}" if few else "")


def _available() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return None


def _container_limit() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return None if text == "max" else float(text)
    return None


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


# ---- disk ------------------------------------------------------------------------------------------------------------------


def _disk(directory: Path) -> Iterator[Finding]:
    place = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    try:
        speed, commit = _write_speed(place)
    except OSError as err:
        yield Finding(
            "disk", str(place), "problem", f"cannot be written to: {err.strerror or err}", "--dir DIR: a place that can"
        )
        return
    free = shutil.disk_usage(place).free
    yield Finding("disk", str(place), "note" if free < FEW_FREE else "ok", f"{_gb(free)} free",
                  "a replay buffer may take more: --dset_max_bytes limits it" if free < FEW_FREE else "")  # fmt: skip
    slow = speed < SLOW_DISK
    yield Finding("disk", "writing", "note" if slow else "ok", f"{speed / 1e6:,.0f} MB/s, {commit * 1e3:.1f} ms to save a small file for good",
                  "a buffer on a local disk collects faster (--buffer_dir)" if slow else "")  # fmt: skip


def _write_speed(place: Path) -> tuple[float, float]:
    """(bytes a second of a large file, seconds of a small one), both until they are on the disk."""
    with tempfile.TemporaryDirectory(dir=place, prefix=".amago-doctor-") as scratch:
        large = os.urandom(2**20)  # a disk may compress zeros
        began = time.perf_counter()
        with open(Path(scratch, "large"), "wb") as f:
            for _ in range(PROBE // len(large)):
                f.write(large)
            f.flush()
            os.fsync(f.fileno())
        speed = PROBE / (time.perf_counter() - began)
        began = time.perf_counter()
        for i in range(5):
            with open(Path(scratch, f"small-{i}"), "wb") as f:
                f.write(large[:4096])
                f.flush()
                os.fsync(f.fileno())
        return speed, (time.perf_counter() - began) / 5


# ---- GPU -------------------------------------------------------------------------------------------------------------------


def _gpu() -> Iterator[Finding]:
    try:
        import torch
    except Exception:  # reported under versions
        return
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            kinds = "bf16 and fp16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
            said = (
                f"{p.name}, {_gb(p.total_memory)}, CUDA {torch.version.cuda}, compute capability {p.major}.{p.minor}, {kinds}"
            )
            yield Finding("GPU", f"cuda:{i}", "ok", said)
            yield from _computes(
                f"cuda:{i}", f"torch on cuda:{i}", "nvidia-smi says whether driver and CUDA fit together", "GPU"
            )
        return
    if _mps(torch):
        yield Finding("GPU", "mps", "ok", "Apple's GPU is there; runs compute on the CPU or on CUDA")
        return
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None:
        why = (
            "PyTorch was installed without CUDA"
            if torch.version.cuda is None
            else f"PyTorch (CUDA {torch.version.cuda}) cannot use it"
        )
        advice = "pip install torch --index-url https://download.pytorch.org/whl/cu126, or a newer driver (nvidia-smi shows its version)"
        yield Finding("GPU", "NVIDIA", "note", f"there is a driver, but {why}", advice)
        return
    yield Finding(
        "GPU", "none", "ok", "everything computes on the CPU, which all settings chosen by 'amago train' are meant for"
    )


def _mps(torch: Any) -> bool:
    return bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available())
