"""``amago eval RUN``: evaluate a trained agent."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from amago.cli.gym_env import ENVIRONMENT, GymEnv, eval_command, is_own_code, read_environment
from amago.cli_utils import whole_number
from amago.cli_utils.arguments import at_least
from amago.cli_utils.scripts import running
from amago.describe import fit_width
from amago.envs import AMAGOEnv
from amago.envs.pool import make_pool
from amago.policy import Policy, filming, find_run, load_policy
from amago.policy.memory import attention_table, conclusion, plot_memory, study_memory, table
from amago.policy.playing import EpisodeResult
from amago.run import video
from amago.run.checkpoint import CheckpointError
from amago.run.console import metrics_table
from amago.run.evaluate import NUMBER_OF_ROLLOUTS, evaluate
from amago.run.metrics import TensorBoardLogger
from amago.run.plots import read_metrics
from amago.run.process import draw_seed
from amago.run.results import Evaluation
from amago.run.rundir import SETTINGS_YAML
from amago.spaces import space_differences

TAG = "eval/video"
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")  # the last: somebody has chosen how to draw


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = "Evaluate an agent that 'amago train' trained. Example: amago eval runs/demo --episodes 100"
    parser.add_argument("run", help="run directory (its latest policy), or one of its checkpoints")
    add_playing_arguments(parser, episodes=40)
    parser.add_argument("--render", action="store_true", help="show one environment in a window")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON: returns of each rollout, intervals, attempts"
    )
    film = parser.add_argument_group("video").add_argument
    film("--video", type=Path, metavar="FILE", help="film one rollout as .mp4 or .gif, beside the evaluation")
    film("--tensorboard", action="store_true", help="log the video to TensorBoard, as in runs that log there anyway")
    film("--log", action="store_true", help="log the video to Weights & Biases (AMAGO_WANDB_PROJECT, AMAGO_WANDB_ENTITY)")
    memory = parser.add_argument_group("memory").add_argument
    study = "find out whether memory is used, and what for: play the same tasks with more and with less of the past in sight"
    memory("--memory", action="store_true", help=study)
    lengths = "lengths of the past to try, in steps; if not given, powers of two"
    memory("--contexts", type=at_least(1), nargs="+", metavar="N", help=lengths)
    memory("--picture", type=Path, metavar="FILE", help="where to draw it; if not given, RUN/memory.png")


def add_playing_arguments(parser: ArgumentParser, episodes: int) -> None:
    """Add the arguments for playing rollouts; ``episodes`` is the default of their number."""
    add = parser.add_argument
    add("--env", help=f"{ENVIRONMENT}; if not given, the one that it was trained on")
    horizon = "truncate rollouts after this many steps; if not given, as in training"
    add("--horizon", type=whole_number, help=horizon)
    add("--episodes", type=at_least(1), default=episodes, help="rollouts to evaluate")
    add("--actors", type=at_least(1), default=8, help="number of environments that run in parallel")
    add("--greedy", action="store_true", help="take the mode of the policy instead of sampling from it")
    add("--gamma", type=float, help="discount whose policy acts, such as 0.9; if not given, that of rollouts")
    add("--modules", nargs="+", default=[], help="your own modules that the agent's classes come from; they are imported")
    add("--device", default="cpu", help="where the networks compute, such as cuda:0")
    seed = "seed of the environments and the policy; if not given, a new one is drawn"
    add("--seed", type=whole_number, help=seed)


def run(args: Namespace) -> int:
    _check_options(args)
    args.seed = draw_seed() if args.seed is None else args.seed
    run_dir, weights = find_run(args.run)
    make_env, policy = load_agent(args, run_dir)
    if args.video is not None:
        _record_video(args, policy, make_env, run_dir)
    if args.memory:
        _study_memory(args, policy, make_env, args.picture or run_dir / "memory.png")
    else:
        _evaluate(args, policy, make_env, f"{make_env.env_id}: {weights}")
    return 0


def _check_options(args: Namespace) -> None:
    """Refuse options that contradict each other, and output that cannot be written or shown, before anything is played."""
    if args.json and (args.memory or args.video is not None):
        raise ValueError("--json is for an evaluation alone: leave --memory and --video out")
    if args.memory and args.episodes < 2:
        raise ValueError(f"--episodes must be at least 2 with --memory, since an interval needs two, got {args.episodes}")
    if args.render:
        if args.memory:
            raise ValueError("--render shows one evaluation in a window, and --memory plays many: leave one of them out")
        if sys.platform.startswith("linux") and not any(os.environ.get(name) for name in _DISPLAYS):
            raise ValueError(
                "--render opens a window, but this machine has no display (DISPLAY and WAYLAND_DISPLAY are not set): run it on a "
                "desktop, connect with 'ssh -X', or film a rollout instead (--video FILE.mp4)"
            )
    if args.video is not None:
        video.check_video_path(args.video)
    elif args.tensorboard or args.log:
        raise ValueError("--tensorboard and --log are for the video: name its file with --video")
    if not args.memory and (args.contexts is not None or args.picture is not None):
        raise ValueError("--contexts and --picture belong to --memory, which is not given")


def _evaluate(args: Namespace, policy: Policy, make_env: GymEnv, title: str) -> None:
    """Evaluate, and print a table of metrics."""
    mode, actors = ("human", 1) if args.render else (None, args.actors)
    metrics = evaluate_policy(policy, make_env, args.episodes, actors, args.seed, mode, progress=True)
    ended = int(metrics[NUMBER_OF_ROLLOUTS])
    if ended < args.episodes:  # only possible where the environment has no time limit
        short = f"only {ended} of {args.episodes} rollouts ended within the steps of each actor, so short ones are favoured"
        print(short, file=sys.stderr if args.json else sys.stdout)
    result = {"environment": make_env.env_id, "all": dict(metrics), **metrics.as_json()}
    print(json.dumps(result, indent=1) if args.json else metrics_table(metrics, title=title))


def evaluate_policy(
    policy: Policy,
    make_env: GymEnv,
    episodes: int,
    actors: int,
    seed: int | None,
    render_mode: str | None = None,
    progress: bool = False,
) -> Evaluation:
    """The metrics of rollouts of a policy's agent, each from its beginning; ValueError if none ends.

    ``episodes`` rollouts (fewer if not as many end), of at most ``actors`` environments side by side; a ``seed`` of None is random.
    """
    with closing(make_env()) as env:
        rows = env.batched_envs
        mode, actors = ("already_vectorized", rows) if rows > 1 else ("sync", min(actors, episodes))
        steps = make_env.steps_of(env, -(-episodes // actors))
    pool = make_pool(lambda: make_env(render_mode), env_mode=mode, parallel_actors=actors, seed=seed)
    options: dict[str, Any] = {"sample": policy.sample, "device": str(policy.device), "seed": seed, "progress": progress}
    try:
        with running():
            metrics = evaluate(policy.agent, pool, steps, episodes=episodes, **options)
    finally:
        pool.close()
    if not metrics.get(NUMBER_OF_ROLLOUTS):
        raise ValueError(
            f"no rollout of {make_env.env_id} ended within {steps} steps of each actor: truncate them with --horizon N"
        )
    return metrics


def _study_memory(args: Namespace, policy: Policy, make_env: GymEnv, picture: Path) -> None:
    """Play, print a table and a conclusion, and draw a picture."""
    with playing(args, make_env) as (envs, bar):

        def on_view(name: str) -> Callable[[int], object]:
            bar.reset()
            bar.set_description(f"memory: {name:<26}")
            return bar.update

        horizon, sample = make_env.horizon(envs[0]), not args.greedy
        study = study_memory(
            policy.agent, envs, args.episodes, horizon, args.contexts, sample, policy.device, args.seed, on_view
        )
    rollouts = f"{args.episodes} rollouts on the same tasks for each line; mean and 95% interval"
    print(f"\nMemory in {study.name}: {rollouts}\n{table(study)}\n")
    print("\n".join(fit_width(line, hang=0) for line in conclusion(study)))
    if study.attention is not None:
        print(f"\n{attention_table(study.attention)}\n")
    print(f"picture: {plot_memory(study, picture)}")


@contextmanager
def playing(args: Namespace, make_env: GymEnv) -> Iterator[tuple[list[AMAGOEnv], tqdm[NoReturn]]]:
    """Environments side by side for the rollouts of a command, and a bar for their steps. Errors in the block show their traceback."""
    with ExitStack() as at_end:
        envs = [at_end.enter_context(closing(make_env())) for _ in range(min(args.actors, args.episodes))]
        bar = at_end.enter_context(tqdm(desc="evaluate", unit="step", leave=False, dynamic_ncols=True, disable=None))
        at_end.enter_context(running())
        yield envs, bar


def film_rollout(policy: Policy, make_env: GymEnv, greedy: bool, seed: int) -> tuple[EpisodeResult, list[Any], float]:
    """A rollout, its pictures, and how many of them make a second."""
    with closing(make_env(render_mode="rgb_array")) as env, running():
        return filming.film(policy.agent, env, make_env.horizon(env), sample=not greedy, device=policy.device, seed=seed)


def _record_video(args: Namespace, policy: Policy, make_env: GymEnv, run_dir: Path) -> None:
    """Film one rollout into a file, and log it if the user requests this, or if the run logs to TensorBoard."""
    played, pictures, fps = film_rollout(policy, make_env, args.greedy, args.seed)
    video.write_video(pictures, args.video, fps)
    print(f"video: {args.video} ({len(played.rewards)} steps, return {sum(played.rewards):.4g})")
    events = run_dir / "tensorboard"
    if args.tensorboard or events.is_dir():
        rows = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
        logger = TensorBoardLogger(events)
        logger.log_video(TAG, args.video, pictures, fps, max((r["env_steps"] for r in rows), default=0))
        logger.on_close()
        print(f"also in TensorBoard: {events}")
    if args.log:
        video.log_to_wandb(run_dir, TAG, args.video)


def load_agent(args: Namespace, run_dir: Path) -> tuple[GymEnv, Policy]:
    """The environment and the policy that the arguments of `add_playing_arguments` describe; ValueError if they do not fit."""
    make_env = environment_of(run_dir, args.env, args.horizon)
    policy = load_policy(args.run, args.device, sample=not args.greedy, gamma=args.gamma, modules=args.modules)
    with closing(make_env()) as env:
        trained, found = (policy.observation_space, policy.action_space), (env.observation_space, env.action_spec.space)
    if differ := space_differences(trained, found, dtypes=False):
        pairs = "; ".join(f"{name}: {of_policy} in training, {of_env} here" for name, of_policy, of_env in differ)
        raise ValueError(f"the policy was trained for other spaces than those of {make_env.env_id}: {pairs}")
    return make_env, policy


def environment_of(run_dir: Path, env_id: str | None, horizon: int | None = None) -> GymEnv:
    """The environment that the user names, or, for None, the recorded one of a run, with its horizon unless another is given.

    A file of the run does not decide which module of the user is imported: such a name is refused.
    """
    recorded, max_steps = read_environment(run_dir) or (None, None)
    if env_id is None:
        if recorded is None:
            raise CheckpointError(
                f"{run_dir} was not made by 'amago train' (no environment in its {SETTINGS_YAML}): name the environment with --env, by its id or as "
                "module:function, a function that makes it"
            )
        env_id = recorded
        if is_own_code(env_id):
            raise ValueError(
                f"{run_dir / SETTINGS_YAML} names the environment {env_id}, and a file does not decide which code of yours is imported: if "
                f"you trust it, name it yourself: {eval_command(run_dir, env_id)}"
            )
    return GymEnv(env_id, horizon or (max_steps if env_id == recorded else None))
