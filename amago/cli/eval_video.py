"""``amago eval RUN --video FILE``: film one rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amago.cli.gym_env import GymEnv
from amago.cli_utils.errors import running
from amago.policy import Policy, filming
from amago.policy.playing import Played
from amago.run import video
from amago.run.plots import read_metrics
from amago.run.rng import draw_seed

TAG = "eval/video"


def check_draws(make_env: GymEnv) -> None:
    """Make an environment and draw it once.

    Raises:
        ValueError: it does not draw itself as an array.
    """
    env = make_env(render_mode="rgb_array")
    try:
        filming.check_draws(env, make_env.env_id)
    finally:
        env.close()


def film(policy: Policy, make_env: GymEnv, greedy: bool, seed: int | None) -> tuple[Played, list[Any], float]:
    """A rollout, its pictures, and how many of them make a second."""
    env = make_env(render_mode="rgb_array")
    drawn = draw_seed() if seed is None else seed
    try:
        with running():
            return filming.film(policy.agent, env, make_env.horizon(env), sample=not greedy, device=policy.device, seed=drawn)
    finally:
        env.close()


def record_video(
    policy: Policy, make_env: GymEnv, greedy: bool, seed: int | None, path: Path, run_dir: Path, tensorboard: bool, wandb: bool
) -> None:
    """Film one rollout into a file, and log it where it is asked for, or where the run logs to TensorBoard."""
    played, pictures, fps = film(policy, make_env, greedy, seed)
    video.write_video(pictures, path, fps)
    print(f"video: {path} ({len(played.rewards)} steps, return {sum(played.rewards):.4g})")
    events = run_dir / "tensorboard"
    if tensorboard or events.is_dir():
        rows = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
        video.log_to_tensorboard(events, TAG, pictures, fps, step=max((r["env_steps"] for r in rows), default=0))
        print(f"also in TensorBoard: {events}")
    if wandb:
        video.log_to_wandb(run_dir, TAG, path)
