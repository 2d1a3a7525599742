"""``amago card RUN``: a directory with a trained agent, to be handed on."""

from __future__ import annotations

import importlib.util
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tqdm import tqdm

from amago.cli.eval import add_playing_arguments, check_fits, environment_of
from amago.cli.eval_video import check_draws, film
from amago.cli.gym_env import ARGS_FILE, GymEnv, look_in_working_directory
from amago.cli_utils.errors import running
from amago.policy import Policy, find_run, load_policy
from amago.policy.card import Results, measure, write_card
from amago.run import video
from amago.run.rng import draw_seed


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Evaluate a trained agent, and write a directory that amago.load_policy opens anywhere: weights (safetensors), settings, spaces, "
        "returns with intervals, a video if the environment draws itself, and a page about it in the format of the Hugging Face Hub. "
        "Example: amago card runs/demo --out demo_card, then amago push demo_card USER/NAME"
    )
    parser.add_argument("run", help="run directory (its latest policy), or one of its checkpoints")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="the directory to write; if not given, RUN/card")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier card there")
    parser.add_argument("--name", default=None, help="of the agent; if not given, that of the run")
    parser.add_argument(
        "--license",
        default=None,
        metavar="ID",
        help="under which others may use the agent, as the Hub names it: mit, cc-by-4.0, ...",
    )
    add_playing_arguments(parser, episodes=100)
    parser.add_argument(
        "--modules", nargs="+", default=[], help="your own modules that the agent's classes come from; they are imported"
    )
    parser.add_argument("--no_video", "--no-video", action="store_true", help="film nothing")


def run(args: Namespace) -> int:
    for name, least in (("episodes", 2), ("actors", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    run_dir, weights = find_run(args.run)
    make_env = environment_of(run_dir, args.env)
    for module in args.modules:
        look_in_working_directory(module)
    policy = load_policy(args.run, device=args.device, gamma=args.gamma, modules=args.modules)
    seed = draw_seed() if args.seed is None else args.seed
    results = _measure(args, policy, make_env, seed)

    def films(directory: Path) -> tuple[str | None, str]:
        return (None, "none was asked for") if args.no_video else _film(policy, make_env, args.greedy, seed, directory)

    recorded = json.dumps({"env": make_env.env_id, "horizon": make_env.max_steps})
    out = write_card(
        policy, results, args.out or run_dir / "card", run_dir=run_dir, name=args.name, environment=make_env.env_id,
        licence=args.license, modules=args.modules, film=films, extra_files={ARGS_FILE: recorded}, overwrite=args.overwrite,
    )  # fmt: skip
    for name, score in results.scores.items():
        print(f"return in {name}: {score}, {score.rollouts} rollouts of {weights}")
    print(f"card: {out} ({', '.join(sorted(p.name for p in out.iterdir()))})")
    print(f"to upload it: amago push {out} USER/NAME")
    return 0


def _measure(args: Namespace, policy: Policy, make_env: GymEnv, seed: int) -> Results:
    envs = [make_env() for _ in range(min(args.actors, args.episodes))]
    try:
        check_fits(make_env.env_id, envs[0], policy)
        with running(), tqdm(desc="evaluate", unit="step", leave=False, dynamic_ncols=True, disable=None) as bar:
            return measure(policy, envs, args.episodes, make_env.horizon(envs[0]), args.greedy, seed, bar.update)
    finally:
        for env in envs:
            env.close()


def _film(policy: Policy, make_env: GymEnv, greedy: bool, seed: int, directory: Path) -> tuple[str | None, str]:
    """(name of the video, "") or (None, why there is none); an agent without a film is worth handing on, too."""
    suffix = next(
        (s for s, package in ((".mp4", "moviepy"), (".gif", "PIL")) if importlib.util.find_spec(package) is not None), None
    )
    if suffix is None:
        reason = "it needs more packages, pip install 'amago[video]'"
    else:
        try:
            check_draws(make_env)
        except Exception as err:  # environments draw with packages of all kinds, which fail in all ways
            reason = (str(err) or repr(err)).splitlines()[0].rstrip(".")
        else:
            _, pictures, fps = film(policy, make_env, greedy, seed)
            return video.write_video(pictures, directory / f"replay{suffix}", fps).name, ""
    print(f"no video: {reason}")
    return None, reason
