"""``amago eval RUN``: evaluate a trained agent."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import gymnasium as gym

from amago.cli.gym_env import GymEnv
from amago.cli.train import ARGS_FILE
from amago.cli_utils import whole_number
from amago.cli_utils.errors import running
from amago.envs import AMAGOEnv
from amago.envs.pool import make_pool
from amago.policy import Policy, find_run, load_policy
from amago.run.checkpoint import CheckpointError
from amago.run.console import metrics_table
from amago.run.evaluate import NUMBER_OF_ROLLOUTS, evaluate
from amago.spaces import space_differences

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")  # the last: somebody has chosen how to draw


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = "Evaluate an agent that 'amago train' trained. Example: amago eval runs/demo --episodes 100"
    parser.add_argument("run", help="run directory (its latest policy), or one of its checkpoints")
    parser.add_argument("--env", default=None, help="id of the environment; if not given, the one that it was trained on")
    parser.add_argument("--episodes", type=whole_number, default=40, help="rollouts to evaluate")
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
    parser.add_argument("--render", action="store_true", help="show one environment in a window")


def run(args: Namespace) -> int:
    for name in ("episodes", "actors"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.render:
        _check_display()
    run_dir, weights = find_run(args.run)
    make_env = _environment(run_dir, args.env)
    policy = load_policy(args.run, device=args.device, gamma=args.gamma)
    env = make_env()
    _check_fits(make_env.env_id, env, policy)
    actors = 1 if args.render else min(args.actors, args.episodes)
    steps = make_env.horizon(env) * -(-args.episodes // actors) + 1
    env.close()
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
    print(metrics_table(metrics, title=f"{make_env.env_id}: {weights}"))
    return 0


def _check_display() -> None:
    """Refuse a window where there is no display: Pygame would draw it into memory, and MuJoCo end in an error about OpenGL."""
    if sys.platform.startswith("linux") and not any(os.environ.get(name) for name in _DISPLAYS):
        raise ValueError(
            "--render opens a window, but this machine has no display (DISPLAY and WAYLAND_DISPLAY are not set): run it on a desktop, "
            "connect with 'ssh -X', or record a video instead (amago.envs.builtin.crafter.VideoRecorder, gymnasium.wrappers.RecordVideo)"
        )


def _check_fits(env_id: str, env: AMAGOEnv, policy: Policy) -> None:
    def shapes(space: gym.spaces.Dict) -> dict[str, tuple[int, ...] | None]:
        return {k: s.shape for k, s in space.spaces.items()}

    spaces = env.observation_space, env.action_spec.space
    if space_differences((policy.observation_space, policy.action_space), spaces, dtypes=False):
        trained, found = shapes(policy.observation_space), shapes(env.observation_space)
        raise ValueError(
            f"the policy was trained for observations {trained} and actions {policy.action_space}, but {env_id} has observations "
            f"{found} and actions {env.action_spec.space}"
        )


def _environment(run_dir: Path, env_id: str | None) -> GymEnv:
    path = run_dir / ARGS_FILE
    if path.is_file():
        recorded = json.loads(path.read_text())
        return GymEnv(env_id or recorded["env"], recorded["horizon"] if env_id is None else None)
    if env_id is None:
        raise CheckpointError(f"{run_dir} was not made by 'amago train' (no {ARGS_FILE}): name the environment with --env")
    return GymEnv(env_id)
