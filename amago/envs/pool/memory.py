"""How much memory this process may still use: of the machine, and within the limits of its container (Linux control groups)."""

from __future__ import annotations

from pathlib import Path


def available_memory(root: str | Path = "/") -> int | None:
    """Bytes that this process may still allocate; None where the system does not report it.

    The smallest of the machine's available memory (swap included) and what the memory limits of the process's control groups
    (version 1 or 2) leave. Page cache that the kernel can reclaim counts as available.

    Args:
        root: the directory that contains ``proc`` and ``sys``.
    """
    root = Path(root)
    groups = root / "sys/fs/cgroup"
    available = [_machine(root / "proc/meminfo")]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            available.append(_control_group(groups, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            available.append(_control_group(groups / "memory", path, *files))
    return min((n for n in available if n is not None), default=None)


def _machine(meminfo: Path) -> int | None:
    kibibytes = [int(line.split()[1]) for line in _lines(meminfo) if line.startswith(("MemAvailable:", "SwapFree:"))]
    return 1024 * sum(kibibytes) if kibibytes else None


def _control_group(top: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """What the tightest limit of a control group and its ancestors leaves; None where there is no limit.

    Args:
        top: directory of the root group.
        path: of the group, relative to the root group.
        limit_file, usage_file: files of a group that contain its limit and its usage in bytes.
        reclaimable: entry of ``memory.stat`` that says how much of the usage can be reclaimed.
    """
    left = []
    folder = top / path.strip("/")
    for group in (folder, *folder.parents):
        limit, usage = _lines(group / limit_file), _lines(group / usage_file)
        if limit and usage and limit[0].isdigit():
            stat = _lines(group / "memory.stat")
            cache = sum(int(line.split()[1]) for line in stat if line.startswith(f"{reclaimable} "))
            left.append(max(0, int(limit[0]) - int(usage[0]) + cache))
        if group == top:
            break
    return min(left, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
