"""Three tasks with returns of 1, 90 and 2,000 in one agent: a use of `MultiTaskAgent`.

python examples/19_returns_of_any_size.py --agent_type multitask --run_name mixture --buffer_dir runs
"""

from argparse import ArgumentParser, Namespace

from support.toy_mixture import TASKS, ToyMixture

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--task", default="all", choices=("all", *TASKS), help="one task, or all of them")
    parser.set_defaults(
        agent_type="multitask", parallel_actors=48, timesteps_per_epoch=48, grads_per_epoch=50, epochs=80, memory_size=64,
        memory_layers=1, learning_rate=1e-3, batch_size=48, val_interval=5,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    tasks = TASKS if args.task == "all" else (args.task,)

    def maker(task: str):
        return lambda: AMAGOEnv(ToyMixture(task), env_name=task)

    makers = [maker(tasks[i % len(tasks)]) for i in range(args.parallel_actors)]
    horizon = ToyMixture().horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.02, gamma=0.95)
    config |= {
        "Actor.d_hidden": 128,
        "NCritics.d_hidden": 128,
        "NCriticsTwoHot.d_hidden": 128,
        "NCriticsTwoHot.output_bins": 64,
    }
    config |= {"NCriticsTwoHot.min_return": -100.0, "NCriticsTwoHot.max_return": 1e5, "Multigammas.discrete": [0.8]}
    config |= {"TformerTrajEncoder.n_heads": 4}
    explore = cli_utils.switch_exploration(config, "egreedy")
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, makers, makers, max_seq_len=horizon, val_timesteps_per_epoch=4 * horizon, tstep_encoder_type=tstep,
        traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore, group_name="returns_of_any_size",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 250)


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment, test)
