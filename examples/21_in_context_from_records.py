"""Learn to learn from records: clone the learning histories of simple learners, or the best actions (a decision-pretrained model).

python examples/21_in_context_from_records.py --task room --method ad --run_name distilled --buffer_dir runs

"room": a dark room with a hidden goal, in attempts of 15 steps. "bandit": five arms that pay 1 with hidden probabilities. The learners
are tabular Q-learning and UCB, one for each task. "ad" clones their actions (Algorithm Distillation), "dpt" the best actions, which are
recorded as an extra field, and "off_policy" learns from experience of its own.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import gymnasium as gym
import numpy as np
from support.learners import BEST, LENGTH, Bandit, Room, history

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.experiment import Experiment
from amago.loading import HistoryDataset
from amago.store import TrajectoryWriter

TASKS = {"room": Room, "bandit": Bandit}


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--task", choices=tuple(TASKS), default="room", help="what is to be learned")
    parser.add_argument("--method", choices=("ad", "dpt", "off_policy"), default="ad", help="how it is learned")
    parser.add_argument("--tasks", type=int, default=200, help="tasks in the records, each with a learner")
    parser.add_argument("--histories", type=int, default=40, help="attempts of each learner")
    parser.add_argument("--attempts", type=int, default=4, help="attempts in a rollout of the trained model")
    parser.set_defaults(parallel_actors=24, timesteps_per_epoch=60, grads_per_epoch=100, epochs=10, memory_size=64, memory_layers=2,
                        learning_rate=1e-3, val_interval=5)  # fmt: skip


def record(args: Namespace) -> Path:
    """Write the learners' histories into the directory of the run, unless they are there."""
    path, kind, rng = Path(args.buffer_dir) / args.run_name / "histories", TASKS[args.task], np.random.default_rng(args.seed)
    if not path.exists():
        spaces = {"action_space": kind.action_space, "obs_space": gym.spaces.Dict(observation=kind.observation_space)}
        out = TrajectoryWriter(path / "protected", writer="history", extra_fields=[BEST], **spaces)
        for task in range(args.tasks):
            for attempt in history(kind(args.histories, task), rng):
                out.write(attempt)
        out.close()
    return path


def make_experiment(args: Namespace) -> Experiment:
    def make_env() -> AMAGOEnv:
        return AMAGOEnv(TASKS[args.task](args.attempts), env_name=args.task)

    horizon, config, fields = args.attempts * LENGTH, {"TformerTrajEncoder.n_heads": 4}, {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=64, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.005)
    if args.method != "off_policy":
        config |= {"Agent.online_coeff": 0.0, "Agent.offline_coeff": 1.0, "Agent.fake_filter": True}  # plain cloning
        every, label = max(1, args.histories // (2 * args.attempts)), BEST.name if args.method == "dpt" else None
        fields = {"dataset": HistoryDataset(record(args), every=every, label=label), "extra_fields": [BEST]}
        fields |= {"start_collecting_at_epoch": float("inf")}
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=horizon, val_timesteps_per_epoch=2 * horizon + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, group_name="in_context", **fields,
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 20 * experiment.max_seq_len, title="rollouts of new tasks")


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
