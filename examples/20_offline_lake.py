"""Learn from recorded rollouts only: record a trained agent, then train another one on the recording.

python examples/20_offline_lake.py --recorder demo_out/transformer --run_name offline --buffer_dir runs

The recorder here is what `make demo` (or `amago demo --out demo_out`) leaves.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from amago import cli_utils, load_policy
from amago.cli.demo import HORIZON, make_env
from amago.envs.pool import make_pool
from amago.experiment import Experiment
from amago.run.console import metrics_table
from amago.run.evaluate import evaluate

ACTORS = 24


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--recorder", required=True, metavar="RUN", help="run or checkpoint of the agent to record, trained by amago demo"
    )
    parser.add_argument(
        "--rollouts", type=int, default=2_000, help="rollouts to record, including those that RUN_NAME already has"
    )
    parser.set_defaults(
        parallel_actors=ACTORS, timesteps_per_epoch=HORIZON, grads_per_epoch=100, epochs=20, memory_size=64, memory_layers=2,
        learning_rate=1e-3, val_interval=5,
    )  # fmt: skip


def record(args: Namespace) -> None:
    """Record rollouts into ``buffer/protected`` of the run, which is sampled like the rest and never deleted."""
    protected = Path(args.buffer_dir) / args.run_name / "buffer" / "protected"
    if any(protected.glob("*.safetensors")):
        return
    protected.mkdir(parents=True, exist_ok=True)
    where = {"save_trajs_to": str(protected), "save_trajs_as": "segments"}
    pool = make_pool([make_env] * ACTORS, env_mode="sync", parallel_actors=ACTORS, recorder=where, seed=args.seed)
    try:
        agent = load_policy(args.recorder).agent
        metrics = evaluate(
            agent, pool, HORIZON * (args.rollouts // ACTORS + 1), episodes=args.rollouts, seed=args.seed, progress=True
        )
    finally:
        pool.close()
    print(metrics_table(metrics, title=f"recorded: {args.recorder}"))


def make_experiment(args: Namespace) -> Experiment:
    record(args)
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=128, d_output=64, hide_rl2s=True)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.005, online_coeff=0.0, offline_coeff=1.0)
    config |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128, "TformerTrajEncoder.n_heads": 4}
    config |= {"Experiment.start_collecting_at_epoch": float("inf")}  # learn without collecting
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=HORIZON, val_timesteps_per_epoch=2 * HORIZON + 1, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, group_name="offline_lake",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 20 * HORIZON, title="learned from the record")


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
