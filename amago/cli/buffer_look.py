"""``amago buffer info``, ``amago buffer verify`` and ``amago buffer head``."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from amago.cli import space_syntax
from amago.cli.buffer_place import existing, view_of
from amago.data.trajectory import StoredTraj
from amago.store import StoreView, TrajectoryStore
from amago.store import index as store_index
from amago.store.file_cache import FileCache
from amago.store.store import PARTITIONS

_MANY = 20_000  # trajectories that `info` reads at most


def info(args: Namespace) -> int:
    """``amago buffer info``."""
    root = existing(args.run)
    store = TrajectoryStore(root, edit=False)
    store.refresh()
    sizes, view = store.info(), store.view()
    print(f"{root}")
    print(f"  files         {sizes['files']:,.0f}, {sizes['bytes'] / 1e6:,.1f} MB")
    parts = ", ".join(f"{sizes[f'trajectories_{p}']:,.0f} in {p}" for p in PARTITIONS)
    print(f"  trajectories  {len(view):,} ({parts})")
    if sizes["quarantined"]:
        print(f"  damaged       {sizes['quarantined']:,.0f} files ('amago buffer verify' lists the reasons)")
    if not len(view):
        return 0
    lengths = view.lengths
    print(f"  steps         {lengths.sum():,} ({lengths.mean():.1f} a trajectory, {lengths.min():,} to {lengths.max():,})")
    for key, space in view.obs_space(0).spaces.items():
        print(f"  observation   {key!r}: {space.shape} {space.dtype}")
    for x in view.schema(0).extras:
        print(f"  extra field   {x.name!r}: {x.shape} {x.dtype}, rows {x.rows}")
    actions = view.action_spec(0).space
    print(f"  actions       {actions}")
    if text := space_syntax.space_text(actions):
        print(f"  as text       --action-space '{text}'")
    read = np.unique(np.linspace(0, len(view) - 1, min(_MANY, len(view))).astype(int))
    found: dict[str, list[tuple[float, bool]]] = {}
    for i in read.tolist():
        traj = view.read(i, keys=())
        found.setdefault(traj.env_name, []).append((float(traj.rews.sum()), bool(traj.dones[-1, 0])))
    if len(read) < len(view):
        print(f"  The returns below are those of {len(read):,} trajectories, evenly spaced over the buffer.")
    for name, rows in sorted(found.items()):
        returns = np.array([r for r, _ in rows])
        ended = np.mean([d for _, d in rows])
        print(
            f"  {name or '(no name)'}: {len(rows):,} trajectories, return {returns.mean():.4g} "
            f"({returns.min():.4g} to {returns.max():.4g}), {ended:.0%} terminated"
        )
    return 0


def head(args: Namespace) -> int:
    """``amago buffer head``."""
    view = view_of(existing(args.run))
    print(f"{'index':>6}  {'steps':>6}  {'return':>10}  {'end':<10}  {'environment':<20}  file")
    for i in range(min(args.count, len(view))):
        traj = view.read(i, keys=() if not args.steps else None)
        end = "terminated" if traj.dones[-1, 0] else "cut"
        path = Path(view.path(i))
        print(
            f"{i:>6}  {len(traj):>6}  {traj.rews.sum():>10.4g}  {end:<10}  {traj.env_name[:20]:<20}  {path.parent.name}/{path.name}"
        )
        spec = view.action_spec(i)
        for t in range(min(args.steps, len(traj))):
            obs = ", ".join(f"{k}={_short(v[t])}" for k, v in traj.obs.items())
            action = _short(np.asarray(spec.to_env(traj.actions[t])))
            print(f"        t={traj.start_time + t}: {obs}; action {action} -> reward {traj.rews[t, 0]:.4g}")
    if not len(view):
        print("(empty)")
    return 0


def _short(a: np.ndarray) -> str:
    """At most eight numbers of an array."""
    flat = np.asarray(a).reshape(-1)
    text = " ".join(f"{x:.4g}" for x in flat[:8].tolist())
    return f"[{text}{f' ... {flat.size} numbers' if flat.size > 8 else ''}]"


# ---- verify ----------------------------------------------------------------------------------------------------------------


def verify(args: Namespace) -> int:
    """``amago buffer verify``; exit code 1 if anything is wrong."""
    root = existing(args.run)
    problems, files, trajectories = [], 0, 0
    names = [(p, path.name) for p in PARTITIONS for path in sorted((root / p).glob("*")) if not path.name.startswith(".")]
    for partition, name in tqdm(names, unit="file", desc="verify", disable=args.quiet or None):
        files += 1
        try:
            schemas = store_index.Schemas()
            entry = store_index.load(str(root / partition), partition, name, schemas, lambda *stamp: False, False)
            view = StoreView(str(root), [entry], FileCache(1))
            for i in range(len(view)):
                if problem := _problem(view.read(i), view.action_spec(i)):
                    problems.append(f"{partition}/{name}: trajectory {i}: {problem}")
            trajectories += len(view)
        except FileNotFoundError:
            continue  # the run that uses the buffer has deleted it since it was listed
        except Exception as err:  # one damaged file must not keep the others from being checked
            problems.append(f"{partition}/{name}: {err}")
    for line in problems:
        print(line)
    verdict = f"{len(problems):,} problems" if problems else "no damage found"
    print(f"{root}: {files:,} files, {trajectories:,} trajectories: {verdict}")
    return 1 if problems else 0


def _problem(traj: StoredTraj, spec: Any) -> str | None:
    """Why a trajectory is unfit for training although its checksums are right; None if it is fit."""
    for name, values in (
        *((f"observation {k!r}", v) for k, v in traj.obs.items()),
        *((f"extra field {k!r}", v) for k, v in traj.extras.items()),
        ("reward", traj.rews),
        ("action", traj.actions),
    ):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return f"{name} is not finite at step {int(np.argwhere(~np.isfinite(values))[0, 0])}"
    if traj.dones[:-1].any():
        return f"the episode terminates at step {int(np.argmax(traj.dones))}, but more steps follow"
    if spec.kind != "continuous":  # recordings of other programs may exceed the bounds, and agents clamp actions
        try:
            spec.check(traj.actions)
        except ValueError as err:
            return f"{err} (actions {spec.space})"
    return None
