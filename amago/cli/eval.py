"""``amago eval RUN``: evaluate a trained agent."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import gymnasium as gym

from amago.cli.eval_video import check_draws, record_video
from amago.cli.gym_env import ARGS_FILE, GymEnv, maker_is_named
from amago.cli_utils import whole_number
from amago.cli_utils.errors import running
from amago.envs import AMAGOEnv
from amago.envs.pool import make_pool
from amago.policy import Policy, find_run, load_policy
from amago.run.checkpoint import CheckpointError
from amago.run.console import metrics_table
from amago.run.evaluate import NUMBER_OF_ROLLOUTS, evaluate
from amago.run.video import check_video_path
from amago.spaces import space_differences

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")  # the last: somebody has chosen how to draw


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = "Evaluate an agent that 'amago train' trained. Example: amago eval runs/demo --episodes 100"
    parser.add_argument("run", help="run directory (its latest policy), or one of its checkpoints")
    add_playing_arguments(parser, episodes=40)
    parser.add_argument("--render", action="store_true", help="show one environment in a window")
    video = parser.add_argument_group("video")
    video.add_argument(
        "--video", type=Path, default=None, metavar="FILE", help="film one rollout as .mp4 or .gif, beside the evaluation"
    )
    video.add_argument(
        "--tensorboard", action="store_true", help="log the video to TensorBoard, as in runs that log there anyway"
    )
    video.add_argument(
        "--log", action="store_true", help="log the video to Weights & Biases (AMAGO_WANDB_PROJECT, AMAGO_WANDB_ENTITY)"
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--memory",
        action="store_true",
        help="find out whether memory is used, and what for: play the same tasks with more and with less of the past in sight",
    )
    memory.add_argument(
        "--contexts", type=whole_number, nargs="+", default=None, metavar="N",
        help="lengths of the past to try, in steps; if not given, powers of two",
    )  # fmt: skip
    memory.add_argument(
        "--picture", type=Path, default=None, metavar="FILE", help="where to draw it; if not given, RUN/memory.png"
    )


def add_playing_arguments(parser: ArgumentParser, episodes: int) -> None:
    """Add the arguments that say how rollouts are played; ``episodes`` is how many unless the user says."""
    parser.add_argument(
        "--env",
        default=None,
        help="id of the environment, or module:function for what makes it; if not given, the one that it was trained on",
    )
    parser.add_argument("--episodes", type=whole_number, default=episodes, help="rollouts to evaluate")
    parser.add_argument("--actors", type=whole_number, default=8, help="number of environments that run in parallel")
    parser.add_argument("--greedy", action="store_true", help="take the mode of the policy instead of sampling from it")
    parser.add_argument(
        "--gamma", type=float, default=None, help="discount whose policy acts, such as 0.9; if not given, that of rollouts"
    )
    parser.add_argument("--device", default="cpu", help="where the networks compute, such as cuda:0")
    parser.add_argument(
        "--seed",
        type=whole_number,
        default=None,
        help="seed of the environments and the policy; if not given, a new one is drawn",
    )


def run(args: Namespace) -> int:
    for name in ("episodes", "actors"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    _check_options(args)
    run_dir, weights = find_run(args.run)
    make_env = environment_of(run_dir, args.env)
    policy = load_policy(args.run, device=args.device, gamma=args.gamma)
    env = make_env()
    check_fits(make_env.env_id, env, policy)
    horizon = make_env.horizon(env)
    env.close()
    if args.video is not None:
        check_draws(make_env)
    if args.memory:
        from amago.cli.eval_memory import show_memory  # other evaluations do without it

        actors = min(args.actors, args.episodes)
        picture = args.picture or run_dir / "memory.png"
        show_memory(policy, make_env, actors, args.episodes, args.greedy, args.seed, args.contexts, picture)
    else:
        _evaluate(args, policy, make_env, horizon, f"{make_env.env_id}: {weights}")
    if args.video is not None:
        record_video(policy, make_env, args.greedy, args.seed, args.video, run_dir, args.tensorboard, args.log)
    return 0


def _evaluate(args: Namespace, policy: Policy, make_env: GymEnv, horizon: int, title: str) -> None:
    """Evaluate, and print a table of metrics."""
    actors = 1 if args.render else min(args.actors, args.episodes)
    steps = horizon * -(-args.episodes // actors) + 1
    makers = [(lambda: make_env(render_mode="human"))] if args.render else [make_env] * actors
    pool = make_pool(makers, env_mode="sync", parallel_actors=actors, seed=args.seed)
    try:
        with running():
            metrics = evaluate(
                policy.agent, pool, steps, sample=not args.greedy, episodes=args.episodes, device=args.device, seed=args.seed,
                progress=True,
            )  # fmt: skip
    finally:
        pool.close()
    ended = int(metrics.get(NUMBER_OF_ROLLOUTS, 0))
    if ended < args.episodes:  # only possible where the environment has no time limit
        print(f"only {ended} of {args.episodes} rollouts ended within {steps} steps of each actor, so short ones are favoured")
    print(metrics_table(metrics, title=title))


def _check_options(args: Namespace) -> None:
    """Refuse options that contradict each other, and what cannot be written or shown, before anything is played."""
    if args.render:
        _check_display()
    if args.video is not None:
        check_video_path(args.video)
    for option in ("tensorboard", "log"):
        if getattr(args, option) and args.video is None:
            raise ValueError(f"--{option} logs the video: name its file with --video")
    if not args.memory:
        for option in ("contexts", "picture"):
            if getattr(args, option) is not None:
                raise ValueError(f"--{option} belongs to --memory, which is not given")
    elif args.render:
        raise ValueError("--render shows one evaluation in a window, and --memory plays many: leave one of them out")
    elif args.episodes < 2:
        raise ValueError(f"--memory compares rollouts, so --episodes must be at least 2, got {args.episodes}")
    if args.contexts is not None and min(args.contexts) < 1:
        raise ValueError(f"--contexts must be at least 1, the current step, got {min(args.contexts)}")


def _check_display() -> None:
    """Refuse a window where there is no display: Pygame would draw it into memory, and MuJoCo end in an error about OpenGL."""
    if sys.platform.startswith("linux") and not any(os.environ.get(name) for name in _DISPLAYS):
        raise ValueError(
            "--render opens a window, but this machine has no display (DISPLAY and WAYLAND_DISPLAY are not set): run it on a desktop, "
            "connect with 'ssh -X', or film a rollout instead (--video FILE.mp4)"
        )


def check_fits(env_id: str, env: AMAGOEnv, policy: Policy) -> None:
    """Check that an environment has the spaces that a policy was trained for.

    Raises:
        ValueError: it has others; names both.
    """

    def shapes(space: gym.spaces.Dict) -> dict[str, tuple[int, ...] | None]:
        return {k: s.shape for k, s in space.spaces.items()}

    spaces = env.observation_space, env.action_spec.space
    if space_differences((policy.observation_space, policy.action_space), spaces, dtypes=False):
        trained, found = shapes(policy.observation_space), shapes(env.observation_space)
        raise ValueError(
            f"the policy was trained for observations {trained} and actions {policy.action_space}, but {env_id} has observations "
            f"{found} and actions {env.action_spec.space}"
        )


def _check_recorded(env_id: str, path: Path) -> None:
    """Refuse to call whatever function a file names: only the library's own are, and those that the user names."""
    module, colon, _ = env_id.partition(":")
    if colon and module.partition(".")[0] != "amago" and maker_is_named(env_id):
        raise ValueError(
            f"{path} names the environment {env_id}, and a file does not decide which code of yours is called: if you trust it, name it "
            f"with --env {env_id}"
        )


def environment_of(run_dir: Path, env_id: str | None) -> GymEnv:
    """The environment of a run, or the one that the user names.

    Raises:
        CheckpointError: the run does not know its environment.
        ValueError: it does, but names a function of the user's own.
    """
    path = run_dir / ARGS_FILE
    if path.is_file():
        recorded = json.loads(path.read_text())
        if env_id is None:
            _check_recorded(recorded["env"], path)
        return GymEnv(env_id or recorded["env"], recorded["horizon"] if env_id is None else None)
    if env_id is None:
        raise CheckpointError(
            f"{run_dir} was not made by 'amago train' (no {ARGS_FILE}): name the environment with --env, by its id or as "
            "module:function, a function that makes it"
        )
    return GymEnv(env_id)
