"""``amago buffer``: import data into a run's replay buffer, export it, and inspect or verify the buffer."""

from __future__ import annotations

import re
import sys
import time
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from tqdm import tqdm

from amago.cli import space_syntax
from amago.cli.original_source import open_original
from amago.cli_utils import whole_number
from amago.cli_utils.arguments import DefaultsHelpFormatter
from amago.data.trajectory import StoredTraj
from amago.loading.dataset import check_same_box, check_same_spaces
from amago.loading.offline import OfflineDataset
from amago.loading.offline.arrays import ArrayDataset, read_npz
from amago.loading.offline.d4rl import D4RLDataset, read_hdf5
from amago.loading.offline.minari import MinariDataset, export
from amago.loading.offline.original import OriginalDataset, files_of_original
from amago.loading.sources import copy_to, files_of
from amago.store import StoreError, StoreView, TrajectoryStore
from amago.store import index as store_index
from amago.store.file_cache import FileCache
from amago.store.store import FIFO, PARTITIONS, PROTECTED

FORMATS = ("auto", "minari", "d4rl", "npz", "original")
_MANY = 20_000  # trajectories that `info` reads at most


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Import, export, inspect or verify the replay buffer of a run. RUN is the run's directory, or the buffer directory in it. "
        "Example: amago buffer import halfcheetah_medium.hdf5 runs/demo"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, summary: str, example: str) -> ArgumentParser:
        return actions.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. Example: amago buffer {example}",
            formatter_class=DefaultsHelpFormatter,
        )  # fmt: skip

    _add_import(add)
    sub = add("export", "write the trajectories of a buffer as a new Minari data set", "export runs/demo demo/cartpole-v0")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub.add_argument(
        "dataset",
        metavar="ID",
        help="id of the new data set, NAME-vN or NAMESPACE/NAME-vN; it is written to $MINARI_DATASETS_PATH",
    )
    sub.add_argument("--part", choices=("all", FIFO, PROTECTED), default="all", help="part of the buffer to export")
    sub.add_argument("--limit", type=whole_number, default=None, help="export only this many trajectories, the first ones")
    sub.add_argument("--quiet", action="store_true", help="show no progress bar")
    sub = add("info", "summarise a buffer: files, trajectories, spaces, returns", "info runs/demo")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub = add("verify", "read every file of a buffer and compare it with its checksums; changes nothing", "verify runs/demo")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub.add_argument("--quiet", action="store_true", help="show no progress bar")
    sub = add("head", "print the first trajectories of a buffer", "head runs/demo -n 3 --steps 5")
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory")
    sub.add_argument("-n", "--count", type=whole_number, default=10, help="number of trajectories to print")
    sub.add_argument("--steps", type=whole_number, default=0, help="number of steps to print of each trajectory")


def _add_import(add: Any) -> None:
    sub = add(
        "import",
        "copy recorded data into buffer/protected, which is sampled and never deleted",
        "import D4RL/pointmaze/umaze-v2 runs/demo",
    )
    sub.add_argument(
        "source", metavar="SOURCE",
        help="id or directory of a local Minari data set, a D4RL .hdf5 file, or an .npz file with the arrays observations, actions, "
        "rewards, terminations (rows of transitions) and, if known, truncations, next_observations; or a directory with files of "
        "the original system",
    )  # fmt: skip
    sub.epilog = space_syntax.DETAILS
    sub.add_argument("run", metavar="RUN", type=Path, help="run directory; created if it does not exist")
    sub.add_argument("--format", choices=FORMATS, default="auto", help="format of SOURCE; auto decides by the file name")
    sub.add_argument(
        "--env", default=None, help="id of the Gymnasium environment whose spaces the data has (d4rl, npz, original)"
    )
    sub.add_argument(
        "--action-space", type=space_syntax.space_argument, default=None, metavar="SPACE",
        help=f"{space_syntax.KINDS}, as explained below (d4rl, npz, original); default: that of --env, else box:-1,1 (original: none)",
    )  # fmt: skip
    sub.add_argument(
        "--max-episode-steps",
        type=whole_number,
        default=None,
        help="time limit of episodes in steps (d4rl files without timeouts)",
    )
    sub.add_argument("--obs-keys", nargs="+", default=None, metavar="KEY", help="observations to keep (minari); default: all")
    sub.add_argument(
        "--env-name",
        default=None,
        help="name of the environment in statistics; default: the recorded name, or that of the file",
    )
    sub.add_argument(
        "--allow-pickle", action="store_true",
        help="also read the .traj files of the original system. They are pickles, which could run any code of their author: only for "
        "files that you trust. Whatever is not an array or a trajectory is refused",
    )  # fmt: skip
    sub.add_argument("--limit", type=whole_number, default=None, help="import only this many trajectories, the first ones")
    sub.add_argument(
        "--save-as", choices=("segments", "npz", "npz-compressed"), default="segments", help="format of the files to write"
    )
    sub.add_argument("--replace", action="store_true", help="delete the trajectories of an earlier import of SOURCE")
    sub.add_argument("--quiet", action="store_true", help="show no progress bar")


def run(args: Namespace) -> int:
    actions = {"import": import_, "export": export_, "info": info, "verify": verify, "head": head}
    try:
        return actions[args.action](args)
    except KeyboardInterrupt:
        print(f"amago buffer {args.action}: stopped", file=sys.stderr)
        return 130
    except (StoreError, OSError) as err:
        raise ValueError(str(err)) from err


# ---- import and export -----------------------------------------------------------------------------------------------------


def import_(args: Namespace) -> int:
    """``amago buffer import``."""
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    began = time.perf_counter()
    dataset, identity = _open_source(args)
    source = dataset.source
    root = args.run if _is_buffer(args.run) else args.run / "buffer"
    if _is_buffer(root):
        view = _view(root)
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
    root = _existing(args.run)
    view = _view(root)
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
        root = args.run if _is_buffer(args.run) else args.run / "buffer"
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


# ---- looking -----------------------------------------------------------------------------------------------------------------


def info(args: Namespace) -> int:
    """``amago buffer info``."""
    root = _existing(args.run)
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
    view = _view(_existing(args.run))
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
    root = _existing(args.run)
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


# ---- where a buffer is -------------------------------------------------------------------------------------------------------


def _is_buffer(path: Path) -> bool:
    return any((path / p).is_dir() for p in PARTITIONS)


def _existing(run: Path) -> Path:
    """The buffer directory of a run."""
    for path in (run / "buffer", run):
        if _is_buffer(path):
            return path
    raise ValueError(f"RUN: {run} has no replay buffer: neither {run / 'buffer'} nor {run} contains {' or '.join(PARTITIONS)}/")


def _view(root: Path) -> StoreView:
    store = TrajectoryStore(root, edit=False)
    store.refresh()
    return store.view()
