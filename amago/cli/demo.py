"""``amago demo``: train a small agent with memory for a few minutes, and draw how it adapts."""

from __future__ import annotations

import shutil
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amago import cli_utils, config
from amago.cli.gym_env import eval_command
from amago.cli_utils import whole_number
from amago.cli_utils.scripts import running
from amago.cli_utils.settings import as_yaml
from amago.envs import AMAGOEnv
from amago.envs.builtin.toy_gym import MetaFrozenLake
from amago.experiment import Experiment
from amago.loading import DiskTrajDataset
from amago.run.callbacks import Callback, Run
from amago.run.evaluate import AVERAGE_RETURN
from amago.run.plots import plot_adaptation, read_metrics
from amago.run.rundir import SETTINGS_YAML
from amago.run.settings import PROGRESS, unwritable

SIZE, ATTEMPTS, STEPS = 3, 6, 9
HORIZON = ATTEMPTS * STEPS
ENVIRONMENT = "amago.cli.demo:make_env"


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        f"Train a Transformer agent on Meta-FrozenLake: {ATTEMPTS} attempts at a {SIZE}x{SIZE} lake whose holes it cannot see. Prints a "
        "table of success by attempt and leaves a picture of it, and of the learning curve."
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="directory of the run and the picture")
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes of training, at most")
    parser.add_argument("--epochs", type=whole_number, default=60, help="epochs of training, at most, with 50 updates each")
    parser.add_argument("--compare", action="store_true", help="train the same agent without memory too (twice the time)")
    parser.add_argument("--seed", type=whole_number, default=0, help="seed of all random numbers")
    parser.add_argument("--quiet", action="store_true", help="print neither progress nor notes")
    parser.add_argument("--progress", default="rich", choices=PROGRESS, help="as in amago train")


def make_env(render_mode: str | None = None) -> AMAGOEnv:
    """A new random lake in every rollout, with six attempts at it."""
    lake = MetaFrozenLake(size=SIZE, k_episodes=ATTEMPTS, max_episode_steps=STEPS, render_mode=render_mode)
    return AMAGOEnv(lake, env_name=f"MetaFrozenLake-{SIZE}x{SIZE}")


class Deadline(Callback):
    """End learning with the epoch in which so many minutes since the start of the run are over."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes

    def on_start(self, experiment: Run) -> None:
        self._end = time.monotonic() + 60.0 * self.minutes

    def on_epoch_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        experiment.should_stop |= time.monotonic() > self._end


def make_experiment(out: Path, traj_encoder: str, args: Namespace) -> Experiment:
    """An experiment with a small agent: width 64, 2 layers."""
    settings: dict[str, Any] = {}
    # hide_rl2s: the reward that comes with the first observation of an attempt would show how the last attempt ended,
    # even to an agent without memory
    tstep = cli_utils.switch_tstep_encoder(settings, "ff", n_layers=1, d_hidden=128, d_output=64, hide_rl2s=True)
    heads = {"n_heads": 4} if traj_encoder == "transformer" else {}
    traj = cli_utils.switch_traj_encoder(settings, traj_encoder, memory_size=64, layers=2, **heads)
    agent = cli_utils.switch_agent(settings, "agent", reward_multiplier=10.0, tau=0.005)
    explore = cli_utils.switch_exploration(settings, "bilevel", rollout_horizon=HORIZON)
    settings |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128}
    cli_utils.use_config(settings)
    return Experiment(
        run_name=traj_encoder, ckpt_base_dir=str(out), dataset=DiskTrajDataset(out, traj_encoder, 10_000),
        max_seq_len=HORIZON, tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent,
        exploration_wrapper_type=explore, make_train_env=make_env, make_val_env=make_env, parallel_actors=24,
        train_timesteps_per_epoch=HORIZON, train_batches_per_epoch=50, val_interval=5, val_timesteps_per_epoch=2 * HORIZON + 1,
        epochs=args.epochs, ckpt_interval=None, batch_size=24, learning_rate=1e-3, lr_warmup_steps=100, dloader_workers=1,
        save_trajs_as="segments", env_mode="sync", seed=args.seed, verbose=not args.quiet, progress=args.progress, log_interval=50,
        callbacks=[Deadline(args.minutes)],
    )  # fmt: skip


def train_and_test(out: Path, traj_encoder: str, args: Namespace) -> tuple[dict[str, float], list[tuple[int, float]]]:
    """(test metrics, learning curve) of one agent."""
    with config.temporary({}):
        experiment = make_experiment(out, traj_encoder, args)
        experiment.start()
        (experiment.run_dir / SETTINGS_YAML).write_text(as_yaml({"env": ENVIRONMENT}), "utf-8")
        try:
            with running():
                experiment.learn()
                rollouts = 40 * experiment.parallel_actors
                metrics = experiment.evaluate_test(make_env, timesteps=40 * HORIZON + 1, episodes=rollouts)
        finally:
            experiment.close()
    rows = [r for r in read_metrics(out / traj_encoder) if r["section"] == "rollout" and AVERAGE_RETURN in r["values"]]
    return metrics, [(r["env_steps"], r["values"][AVERAGE_RETURN]) for r in rows]


def run(args: Namespace) -> int:
    for problem in unwritable("--out", args.out, "the runs of the demo and its picture"):
        raise ValueError(problem)
    for earlier in ("transformer", "ff"):
        shutil.rmtree(args.out / earlier, ignore_errors=True)
    agents = {"Transformer": "transformer"} | ({"no memory (FF)": "ff"} if args.compare else {})
    curves, attempts = {}, {}
    began = time.monotonic()
    for label, encoder in agents.items():
        metrics, curves[label] = train_and_test(args.out, encoder, args)
        attempts[label] = [next(v for k, v in metrics.items() if f"Attempt {i} Success" in k) for i in range(ATTEMPTS)]
    print(f"\nsuccess by attempt at an unknown {SIZE}x{SIZE} lake (trained in {(time.monotonic() - began) / 60:.1f} minutes)")
    print("  attempt        " + "".join(f"{i + 1:>8}" for i in range(ATTEMPTS)))
    for label, rates in attempts.items():
        print(f"  {label:<15}" + "".join(f"{r:>8.2f}" for r in rates))
    picture = args.out / "adaptation.png"
    plot_adaptation(
        curves, attempts, picture, title=f"{ATTEMPTS} attempts at a lake never seen before: the weights stay, memory learns"
    )
    print(f"picture: {picture}")
    for encoder in agents.values():
        print(f"to see what its memory is for: {eval_command(args.out / encoder, ENVIRONMENT, '--memory')}")
    return 0
