"""``amago buffer import`` and ``amago buffer export``."""

from __future__ import annotations

import re
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
from tqdm import tqdm

from amago.cli import space_syntax
from amago.cli.buffer_place import existing, is_buffer, view_of
from amago.cli.original_source import open_original
from amago.data.trajectory import StoredTraj
from amago.loading.dataset import check_same_box, check_same_spaces
from amago.loading.offline import OfflineDataset
from amago.loading.offline.arrays import ArrayDataset, read_npz
from amago.loading.offline.d4rl import D4RLDataset, read_hdf5
from amago.loading.offline.minari import MinariDataset, export
from amago.loading.offline.original import OriginalDataset, files_of_original
from amago.loading.sources import copy_to, files_of
from amago.store.store import PROTECTED


def import_(args: Namespace) -> int:
    """``amago buffer import``."""
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    began = time.perf_counter()
    dataset, identity = _open_source(args)
    source = dataset.source
    root = args.run if is_buffer(args.run) else args.run / "buffer"
    if is_buffer(root):
        view = view_of(root)
        if len(view):
            actions = view.action_spec(0).space
            check_same_spaces(
                dataset.name, source.obs_space, source.action_spec, view.obs_space(0), actions, f"the buffer {root}"
            )
            check_same_box(dataset.name, source.action_spec.space, actions, f"the buffer {root}")
    slug = re.sub(r"[^A-Za-z0-9]+", "-", Path(args.source).stem).strip("-")[:40] or "data"
    writer = f"import-{slug}-{zlib.crc32(identity.encode()):08x}"
    earlier = files_of(root / PROTECTED, writer)
    if earlier and not args.replace:
        raise ValueError(
            f"{args.source} was imported into {root / PROTECTED} before ({len(earlier)} files, the first is {earlier[0].name}). A second "
            "import would duplicate its trajectories; add --replace to replace the earlier import"
        )
    count = len(source) if args.limit is None else min(args.limit, len(source))
    steps = int(source.lengths[:count].sum())
    with tqdm(total=steps, unit="step", unit_scale=True, desc="import", disable=args.quiet or None) as bar:
        copy_to(
            source,
            root / PROTECTED,
            writer,
            save_as=args.save_as,
            limit=args.limit,
            progress=lambda traj: bar.update(len(traj)),
        )
    for path in earlier:
        path.unlink(missing_ok=True)
    skipped = dataset.skipped if isinstance(dataset, OriginalDataset) else {}
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    seconds = time.perf_counter() - began
    print(
        f"imported {count:,} trajectories, {steps:,} steps, into {root / PROTECTED} in {seconds:.1f} s "
        f"({count / seconds:,.0f} trajectories/s, {steps / seconds:,.0f} steps/s)"
    )
    return 0


def export_(args: Namespace) -> int:
    """``amago buffer export``."""
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    root = existing(args.run)
    view = view_of(root)
    chosen = [i for i in range(len(view)) if args.part == "all" or Path(view.path(i)).parent.name == args.part][: args.limit]
    if not chosen:
        raise ValueError(f"{root} has no trajectories" + ("" if args.part == "all" else f" in {args.part}"))
    obs_space, spec = view.obs_space(chosen[0]), view.action_spec(chosen[0])
    for i in chosen:
        if view.obs_space(i) is not obs_space:
            check_same_spaces(view.path(i), view.obs_space(i), view.action_spec(i), obs_space, spec.space, view.path(chosen[0]))
    pieces = 0

    def trajectories() -> Iterator[StoredTraj]:
        nonlocal pieces
        for i in chosen:
            traj = view.read(i)
            pieces += traj.start_time > 0
            yield traj

    with tqdm(
        total=int(view.lengths[chosen].sum()), unit="step", unit_scale=True, desc="export", disable=args.quiet or None
    ) as bar:
        count = export(
            trajectories(), obs_space, spec, args.dataset, f"recorded by amago in {view.env_name(chosen[0])}",
            lambda traj: bar.update(len(traj)),
        )  # fmt: skip
    print(f"exported {count:,} episodes as the Minari data set {args.dataset}")
    if pieces:
        print(
            f"{pieces:,} of these episodes continue the one before: the rollout was saved in pieces, and each piece became an episode"
        )
    return 0


def _open_source(args: Namespace) -> tuple[OfflineDataset, str]:
    """The data set, and a text that identifies its source."""
    path = Path(args.source).expanduser()
    suffixes = {".hdf5": "d4rl", ".h5": "d4rl", ".npz": "npz", ".traj": "original"}
    kind = args.format
    if kind == "auto":
        kind = "original" if files_of_original(path) else suffixes.get(path.suffix.lower(), "minari")
    unused = {
        "minari": ("env", "action_space", "max_episode_steps"), "d4rl": ("obs_keys",), "npz": ("obs_keys", "max_episode_steps"),
        "original": ("obs_keys", "max_episode_steps"),
    }[kind]  # fmt: skip
    for name in unused:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} does not apply to {args.source}, which is read in the format {kind}; --format chooses another"
            )
    identity = str(path.resolve()) if path.exists() else args.source
    if kind == "minari":
        return MinariDataset(args.source, in_memory=False, obs_keys=args.obs_keys, env_name=args.env_name), identity
    if kind == "original":
        obs_space, action_space = _spaces_of(args.env)
        given = args.action_space if args.action_space is not None else action_space
        root = args.run if is_buffer(args.run) else args.run / "buffer"
        return open_original(path, root, obs_space, given, args.env_name, args.allow_pickle), identity
    if not path.is_file():
        raise ValueError(f"SOURCE: the file {path} does not exist")
    obs_space, action_space = _spaces_of(args.env)
    if args.action_space is not None:
        action_space = args.action_space
    if kind == "d4rl":
        d4rl = D4RLDataset(path, args.max_episode_steps, _sized(action_space, path), obs_space, args.env_name)
        return d4rl, identity
    rows = read_npz(str(path))
    action_space = space_syntax.fitted(action_space, rows["actions"], path)
    npz = _NpzFile(
        path, **rows, action_space=action_space, observation_space=obs_space, env_name=args.env_name or path.stem
    )  # fmt: skip
    return npz, identity


class _NpzFile(ArrayDataset):
    """The arrays of a file, which messages name."""

    def __init__(self, path: Path, **rows: Any):
        super().__init__(**rows)
        self._path = path

    @property
    def name(self) -> str:
        return str(self._path)


def _spaces_of(env_id: str | None) -> tuple[gym.Space[Any] | None, Any]:
    if env_id is None:
        return None, None
    try:
        env = gym.make(env_id)
    except gym.error.Error as err:
        raise ValueError(f"--env {env_id}: {err}") from err
    env.close()
    return env.observation_space, env.action_space


def _sized(space: gym.Space[Any] | str | None, path: Path) -> gym.Space[Any] | None:
    if space is None or isinstance(space, gym.Space):
        return space
    return space_syntax.fitted(space, read_hdf5(path)["actions"], path)
