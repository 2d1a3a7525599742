"""``amago buffer``: import data into a run's replay buffer, export it, and inspect or verify the buffer."""

from __future__ import annotations

import re
import sys
import time
import zlib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
from tqdm import tqdm

from amago.cli.gym_env import ENVIRONMENT, SPACE_KINDS, SPACE_SYNTAX, GymEnv, space_argument, space_of_actions
from amago.cli_utils import whole_number
from amago.cli_utils.arguments import DefaultsHelpFormatter, at_least
from amago.data.trajectory import StoredTraj
from amago.loading.dataset import check_same_spaces
from amago.loading.offline import OfflineDataset
from amago.loading.offline.arrays import ArrayDataset, D4RLDataset, read_hdf5, read_npz
from amago.loading.offline.base import check_trajectory, copy_to
from amago.loading.offline.minari import MinariDataset, export
from amago.loading.offline.original import OriginalDataset, action_width, files_of_original
from amago.loading.offline.parquet import ParquetDataset, export_parquet, open_lerobot, parquet_files
from amago.store import StoreError, StoreView, TrajectoryStore, formats
from amago.store import index as store_index
from amago.store.store import PARTITIONS, PROTECTED

_KINDS = {".hdf5": "d4rl", ".h5": "d4rl", ".npz": "npz", ".traj": "original", ".parquet": "parquet"}
_USED = {
    "d4rl": ("env", "action_space", "max_episode_steps"),
    "npz": ("env", "action_space", "fields"),
    "original": ("env", "action_space"),
}
"""For each format, the options of ``import`` that apply to it, of those that do not apply to all."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Import, export, inspect or verify the replay buffer of a run. RUN is the run's directory, or the buffer directory in it. "
        "Example: amago buffer import halfcheetah_medium.hdf5 runs/demo"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def command(name: str, summary: str, example: str, source: str = "", run: str = "run directory") -> ArgumentParser:
        about = f"{summary[0].upper()}{summary[1:]}. Example: amago buffer {name} {example}"
        sub = actions.add_parser(name, help=summary, description=about, formatter_class=DefaultsHelpFormatter)
        if source:
            sub.add_argument("source", metavar="SOURCE", help=source)
        sub.add_argument("run", metavar="RUN", type=Path, help=run)
        if name in ("import", "export"):
            sub.add_argument(
                "--limit", type=at_least(1), default=None, help=f"{name} only so many trajectories, the first ones"
            )
        if name in ("import", "export", "verify"):
            sub.add_argument("--quiet", action="store_true", help="show no progress bar")
        return sub

    source = (
        "id or directory of a local Minari dataset, a D4RL .hdf5 file, or an .npz file with the arrays observations, actions, "
        "rewards, terminations (rows of transitions) and, if known, truncations, next_observations, env_names; or a directory of these, "
        "of an export as Parquet, of a LeRobot dataset (v3), or of files of the original system"
    )
    summary = "copy recorded data into buffer/protected, which is sampled and never deleted"
    _add_import(
        command("import", summary, "D4RL/pointmaze/umaze-v2 runs/demo", source, "run directory; created if it does not exist")
    )
    summary = "write the trajectories of a buffer as a new Minari dataset, or as Parquet files"
    dataset = (
        "id of the new Minari dataset, NAME-vN or NAMESPACE/NAME-vN, which is written to $MINARI_DATASETS_PATH; or directory of the Parquet "
        "files"
    )
    sub = command("export", summary, "runs/demo demo/cartpole-v0")
    sub.add_argument("dataset", metavar="ID", help=dataset)
    formats = "parquet: rows of timesteps, as Hugging Face datasets and the Hub's viewer read them"
    sub.add_argument("--to", choices=("minari", "parquet"), default="minari", help=formats)
    command("info", "summarise a buffer: files, trajectories, spaces, returns", "runs/demo")
    command("verify", "read every file of a buffer and compare it with its checksums; changes nothing", "runs/demo")
    add = command("head", "print the first trajectories of a buffer", "runs/demo -n 3 --steps 5").add_argument
    add("-n", "--count", type=whole_number, default=10, help="number of trajectories to print")
    add("--steps", type=whole_number, default=0, help="number of steps to print of each trajectory")


def _add_import(sub: ArgumentParser) -> None:
    sub.epilog = SPACE_SYNTAX
    add = sub.add_argument
    add("--env", help=f"environment whose spaces the data has (d4rl, npz, original): {ENVIRONMENT}")
    space = f"{SPACE_KINDS}, as explained below (d4rl, npz, original); default: that of --env, else box:-1,1 (original: none)"
    add("--action-space", type=space_argument, metavar="SPACE", help=space)
    limit = "time limit of episodes in steps (d4rl files without timeouts)"
    add("--max-episode-steps", type=whole_number, help=limit)
    name = "name of the environment in statistics; default: the recorded name, or that of the file"
    add("--env-name", help=name)
    fields = "names of arrays in .npz files, such as observations=obs rewards=r observations/camera=pixels"
    add("--fields", nargs="+", type=_field, metavar="FIELD=NAME", help=fields)
    pickles = (
        "also read the .traj files of the original system. They are pickles, which could run any code of their author: only for "
        "files that you trust. Whatever is not an array or a trajectory is refused"
    )
    add("--allow-pickle", action="store_true", help=pickles)
    damaged = (
        "leave out damaged episodes, and print their names (minari, d4rl, npz); otherwise the import is refused. Files of the "
        "original system that cannot be read are always left out"
    )
    add("--skip-damaged", action="store_true", help=damaged)
    add("--save-as", choices=("segments", "npz", "npz-compressed"), default="segments", help="format of the files to write")
    add("--replace", action="store_true", help="delete the trajectories of an earlier import of SOURCE")


def _field(text: str) -> tuple[str, str]:
    name, _, own = text.partition("=")
    if not name or not own:
        raise ArgumentTypeError(f"{text!r} is not FIELD=NAME")
    return name, own


def run(args: Namespace) -> int:
    actions = {"import": import_, "export": export_, "info": info, "verify": verify, "head": head}
    try:
        return actions[args.action](args)
    except KeyboardInterrupt:
        print(f"amago buffer {args.action}: stopped", file=sys.stderr)
        return 130
    except (StoreError, OSError) as err:
        raise ValueError(str(err)) from err


def _is_buffer(path: Path) -> bool:
    return any((path / p).is_dir() for p in PARTITIONS)


def _existing(run: Path) -> Path:
    """The buffer directory of a run."""
    for path in (run / "buffer", run):
        if _is_buffer(path):
            return path
    raise ValueError(f"RUN: {run} has no replay buffer: neither {run / 'buffer'} nor {run} contains {' or '.join(PARTITIONS)}/")


def _open(root: Path) -> TrajectoryStore:
    """The trajectories of a buffer, for reading alone."""
    store = TrajectoryStore(root, edit=False)
    store.refresh()
    return store


# ---- import and export -----------------------------------------------------------------------------------------------------


def import_(args: Namespace) -> int:
    """``amago buffer import``."""
    began = time.perf_counter()
    root = args.run if _is_buffer(args.run) else args.run / "buffer"
    dataset = _open_source(args, root)
    source = dataset.source
    view = _open(root).view() if _is_buffer(root) else None
    if view is not None and len(view):
        actions, there = view.action_spec(0).space, f"the buffer {root}"
        check_same_spaces(dataset.name, source.obs_space, source.action_spec, view.obs_space(0), actions, there)
    path = Path(args.source).expanduser()
    identity = str(path.resolve()) if path.exists() else args.source
    slug = re.sub(r"[^A-Za-z0-9]+", "-", path.stem).strip("-")[:40] or "data"
    target, writer = root / PROTECTED, f"import-{slug}-{zlib.crc32(identity.encode()):08x}"
    earlier = [target / name for name in sorted(formats.files_of(target, writer))]
    if earlier and not args.replace:
        raise ValueError(
            f"{args.source} was imported into {target} before ({len(earlier)} files, the first is {earlier[0].name}). A second "
            "import would duplicate its trajectories; add --replace to replace the earlier import"
        )
    count = min(args.limit or len(source), len(source))
    steps = int(source.lengths[:count].sum())
    with tqdm(total=steps, unit="step", unit_scale=True, desc="import", disable=args.quiet or None) as bar:
        copy_to(source, target, writer, save_as=args.save_as, limit=args.limit, progress=lambda traj: bar.update(len(traj)))
    for file in earlier:
        file.unlink(missing_ok=True)
    left_out = dataset.skipped if isinstance(dataset, OriginalDataset) else dataset.damaged
    for name, reason in left_out.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    seconds = time.perf_counter() - began
    print(
        f"imported {count:,} trajectories, {steps:,} steps, into {target} in {seconds:.1f} s ({steps / seconds:,.0f} steps/s)"
    )
    return 0


def _open_source(args: Namespace, root: Path) -> OfflineDataset:
    """The dataset that the arguments of ``import`` describe, to be copied into the buffer ``root``."""
    path, given = Path(args.source).expanduser(), vars(args)
    kind = "original" if files_of_original(path) else _KINDS.get(path.suffix.lower(), "minari")
    if path.is_dir() and kind == "minari":
        marks = (path / "meta/info.json").is_file(), parquet_files(path), any(path.glob("*.npz"))
        kind = next((name for name, there in zip(("lerobot", "parquet", "npz"), marks) if there), kind)
    for name in ("env", "action_space", "max_episode_steps", "fields"):
        if given[name] is not None and name not in _USED.get(kind, ()):
            raise ValueError(f"--{name.replace('_', '-')} does not apply to {args.source}, which is read in the format {kind}")
    skip, name = args.skip_damaged, args.env_name
    if kind == "minari":
        return MinariDataset(args.source, in_memory=False, env_name=name, skip_damaged=skip)
    if kind in ("parquet", "lerobot"):
        return ParquetDataset(path, name) if kind == "parquet" else open_lerobot(path, env_name=name)
    if kind != "original" and not path.exists():
        raise ValueError(f"SOURCE: the file {path} does not exist")
    obs_space, space = None, args.action_space
    if args.env is not None:
        with closing(GymEnv(args.env)()) as env:
            obs_space, space = env.raw_observation_space, space or env.action_spec.space
    if kind == "original":
        return _open_original(args, path, root, obs_space, space)
    if kind == "d4rl":
        space = space_of_actions(space, read_hdf5(path)["actions"], path) if isinstance(space, str) else space
        return D4RLDataset(path, args.max_episode_steps, space, obs_space, name, skip_damaged=skip)
    rows = read_npz(path, dict(args.fields or ()))
    space = space_of_actions(space, rows["actions"], path)
    rows["env_name"] = name or rows.get("env_name", path.stem)
    dataset = ArrayDataset(**rows, action_space=space, observation_space=obs_space, skip_damaged=skip)
    dataset.title = str(path)
    return dataset


def _open_original(
    args: Namespace, path: Path, root: Path, obs_space: gym.Space | None, space: gym.Space | str | None
) -> OriginalDataset:
    if space is None:
        raise ValueError(
            f"the files in {path} do not say what their actions are: give the environment's id (--env ID), or its action space "
            f"(--action-space SPACE; {SPACE_KINDS})"
        )
    for file in files_of_original(path):
        if file.suffix == ".npz" and file.resolve().is_relative_to(root.resolve()):
            raise ValueError(
                f"{file} lies in the buffer {root}, where it is sampled already; after an import it would be there twice"
            )
    if isinstance(space, str):
        space = space_of_actions(space, np.zeros((1, action_width(path, args.allow_pickle))), path)
    return OriginalDataset(path, space, obs_space, args.env_name, args.allow_pickle)


def export_(args: Namespace) -> int:
    """``amago buffer export``."""
    root = _existing(args.run)
    view = _open(root).view()
    chosen = list(range(len(view)))[: args.limit]
    if not chosen:
        raise ValueError(f"{root} has no trajectories")
    obs_space, spec = view.obs_space(chosen[0]), view.action_spec(chosen[0])
    for i in chosen:
        if view.obs_space(i) is not obs_space:
            check_same_spaces(view.path(i), view.obs_space(i), view.action_spec(i), obs_space, spec.space, view.path(chosen[0]))
    about, pieces = f"recorded by amago in {view.env_name(chosen[0])}", 0

    def exported(traj: StoredTraj) -> None:
        nonlocal pieces
        pieces += traj.start_time > 0

    trajs = tqdm(map(view.read, chosen), "export", len(chosen), unit="trajectory", disable=args.quiet or None)
    if args.to == "parquet":
        extras = view.schema(chosen[0]).extras
        count = export_parquet(trajs, obs_space, spec, Path(args.dataset).expanduser(), extras, exported)
    else:
        count = export(trajs, obs_space, spec, args.dataset, about, exported)
    print(f"exported {count:,} episodes as the {args.to.capitalize()} dataset {args.dataset}")
    if pieces and args.to == "minari":
        reason = "the rollout was saved in pieces, and each piece became an episode"
        print(f"{pieces:,} of these episodes continue the one before: {reason}")
    return 0


# ---- info, head, verify ----------------------------------------------------------------------------------------------------


def info(args: Namespace) -> int:
    """``amago buffer info``."""
    root = _existing(args.run)
    store = _open(root)
    sizes, view = store.info(), store.view()
    print(root)
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
    print(f"  actions       {view.action_spec(0).space}")
    found: dict[str, list[tuple[float, bool]]] = {}
    for i in tqdm(range(len(view)), "info", unit="trajectory", disable=None, leave=False):
        traj = view.read(i, keys=())
        found.setdefault(traj.env_name, []).append((float(traj.rews.sum()), bool(traj.dones[-1, 0])))
    for name, rows in sorted(found.items()):
        returns, ended = np.array(rows).T
        print(
            f"  {name or '(no name)'}: {len(rows):,} trajectories, return {returns.mean():.4g} "
            f"({returns.min():.4g} to {returns.max():.4g}), {ended.mean():.0%} terminated"
        )
    return 0


def head(args: Namespace) -> int:
    """``amago buffer head``."""
    view = _open(_existing(args.run)).view()
    print(f"{'index':>6}  {'steps':>6}  {'return':>10}  {'end':<10}  {'environment':<20}  file")
    for i in range(min(args.count, len(view))):
        traj = view.read(i, keys=() if not args.steps else None)
        end = "terminated" if traj.dones[-1, 0] else "cut"
        path = Path(view.path(i))
        place = f"{path.parent.name}/{path.name}"
        print(f"{i:>6}  {len(traj):>6}  {traj.rews.sum():>10.4g}  {end:<10}  {traj.env_name[:20]:<20}  {place}")
        spec = view.action_spec(i)
        for t in range(min(args.steps, len(traj))):
            obs = ", ".join(f"{k}={_short(v[t])}" for k, v in traj.obs.items())
            action = _short(np.asarray(spec.to_env(traj.actions[t])))
            print(f"        t={traj.start_time + t}: {obs}; action {action} -> reward {traj.rews[t, 0]:.4g}")
    if not len(view):
        print("(empty)")
    return 0


def _short(a: np.ndarray) -> str:
    """At most eight numbers of an array, the first and the last ones."""
    return np.array2string(np.ravel(a), max_line_width=200, precision=4, threshold=8, edgeitems=4)


def verify(args: Namespace) -> int:
    """``amago buffer verify``; exit code 1 if anything is wrong."""
    root = _existing(args.run)
    problems, trajectories = [], 0
    names = [(p, path.name) for p in PARTITIONS for path in sorted((root / p).glob("*")) if not path.name.startswith(".")]
    for partition, name in tqdm(names, unit="file", desc="verify", disable=args.quiet or None):
        try:
            view = StoreView(root, [store_index.load(root, partition, name)])
            for i in range(len(view)):
                traj = view.read(i)
                try:
                    check_trajectory(traj, view.action_spec(i))
                except ValueError as err:
                    problems.append(f"{partition}/{name}: trajectory {i}: {err} (actions {view.action_spec(i).space})")
            trajectories += len(view)
        except FileNotFoundError:
            continue  # the run that uses the buffer has deleted it since it was listed
        except Exception as err:  # one damaged file must not keep the others from being checked
            problems.append(f"{partition}/{name}: {err}")
    for line in problems:
        print(line)
    verdict = f"{len(problems):,} problems" if problems else "no damage found"
    print(f"{root}: {len(names):,} files, {trajectories:,} trajectories: {verdict}")
    return 1 if problems else 0
