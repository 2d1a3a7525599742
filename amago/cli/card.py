"""``amago card``, ``amago push`` and ``amago pull``: a directory with a trained agent, and its way through the Hugging Face Hub."""

from __future__ import annotations

import functools
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from amago.cli.eval import add_playing_arguments, film_rollout, load_agent, playing
from amago.cli.gym_env import GymEnv, eval_command, read_environment
from amago.cli_utils.settings import as_yaml
from amago.policy import Policy, find_run, load_policy
from amago.policy.card import measure, pull_card, push_card, write_card
from amago.run import video
from amago.run.process import draw_seed
from amago.run.rundir import SETTINGS_YAML


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Evaluate a trained agent, and write a directory that amago.load_policy opens anywhere: weights (safetensors), settings, spaces, "
        "returns with intervals, a video if the environment draws itself, and a page about it in the format of the Hugging Face Hub. "
        "Example: amago card runs/demo --out demo_card, then amago push demo_card USER/NAME"
    )
    add = parser.add_argument
    add("run", help="run directory (its latest policy), or one of its checkpoints")
    add("--out", type=Path, metavar="DIR", help="the directory to write; if not given, RUN/card")
    add("--overwrite", action="store_true", help="replace an earlier card there")
    add("--name", help="of the agent; if not given, that of the run")
    licence = "under which others may use the agent, as the Hub names it: mit, cc-by-4.0, ..."
    add("--license", metavar="ID", help=licence)
    add_playing_arguments(parser, episodes=100)
    add("--no_video", "--no-video", action="store_true", help="film nothing")


def run(args: Namespace) -> int:
    run_dir, weights = find_run(args.run)
    make_env, policy = load_agent(args, run_dir)
    seed = draw_seed() if args.seed is None else args.seed
    with playing(args, make_env) as (envs, bar):
        results = measure(policy, envs, args.episodes, make_env.horizon(envs[0]), args.greedy, seed, bar.update)
    environment = as_yaml({"env": make_env.env_id} | ({"horizon": make_env.max_steps} if make_env.max_steps else {}))
    film = None if args.no_video else functools.partial(_film, policy, make_env, args.greedy, seed)
    out = write_card(
        policy, results, args.out or run_dir / "card", run_dir=run_dir, name=args.name, environment=make_env.env_id,
        licence=args.license, modules=args.modules, film=film, extra_files={SETTINGS_YAML: environment}, overwrite=args.overwrite,
    )  # fmt: skip
    for name, score in results.scores.items():
        interval = f"{score.low:.4g} to {score.high:.4g}"
        print(f"return in {name}: {score.mean:.4g} ({interval}), {score.rollouts} rollouts of {weights}")
    print(f"card: {out} ({_files_in(out)})")
    print(f"to upload it: {shlex.join(['amago', 'push', str(out)])} USER/NAME")
    return 0


def _files_in(directory: Path) -> str:
    return ", ".join(sorted(p.name for p in directory.iterdir()))


def _film(policy: Policy, make_env: GymEnv, greedy: bool, seed: int, directory: Path) -> tuple[str | None, str]:
    """(name of the video, "") or (None, why there is none); a card without a film is written, too."""
    path = directory / f"replay{video.best_suffix()}"
    try:
        video.check_video_path(path)
        _, pictures, fps = film_rollout(policy, make_env, greedy, seed)
        return video.write_video(pictures, path, fps).name, ""
    except Exception as err:  # environments draw with packages of all kinds, which fail in all ways
        reason = (str(err) or repr(err)).splitlines()[0].rstrip(".")
    print(f"no video: {reason}")
    return None, reason


# ---- the Hub ---------------------------------------------------------------------------------------------------------------


def add_push_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Upload a directory that 'amago card' or 'amago buffer export --to parquet' wrote to the Hugging Face Hub, or to the server that the variable HF_ENDPOINT names. It needs "
        "pip install 'amago[hub]' and an access token (hf auth login, or the variable HF_TOKEN). A directory with other files than those "
        "of a card, or with anything that looks like a secret, is refused. Example: amago push demo_card USER/demo"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of the card, or of the Parquet files")
    parser.add_argument("repository", metavar="USER/NAME", help="repository, which is created if there is none")
    parser.add_argument("--private", action="store_true", help="a new repository is seen by its owners alone")
    parser.add_argument("--message", help="of the commit")


def push(args: Namespace) -> int:
    print(f"pushed: {push_card(args.directory, args.repository, args.private, args.message)}")
    return 0


def add_pull_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Download an agent that 'amago push' uploaded to the Hugging Face Hub, or to the server that the variable HF_ENDPOINT names. Only the "
        "files of a card are fetched, none of which can hold a pickled object. Example: amago pull USER/demo --out demo"
    )
    parser.add_argument("repository", metavar="USER/NAME", help="repository")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory to write; if not given, NAME")
    parser.add_argument("--revision", help="branch, tag or commit; if not given, the newest")


def pull(args: Namespace) -> int:
    out = pull_card(args.repository, args.out, args.revision)
    print(f"pulled: {out} ({_files_in(out)})")
    try:
        load_policy(out)
    except ValueError as err:  # classes of somebody's own, which are not imported unasked
        print(f"to load it, more is needed: {err}")
    else:
        env_id = (read_environment(out) or ("",))[0]
        print(f'to load it: amago.load_policy("{out}"); to evaluate it: {eval_command(out, env_id)}')
    return 0
