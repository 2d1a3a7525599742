"""A script of one file that takes what it needs from `amago.cli_utils`, as the older examples do (S, A)."""

from argparse import ArgumentParser

from small import SIZES, make_env

from amago.cli_utils import *


def add_cli(parser):
    parser.add_argument("--max_seq_len", type=int, default=8)
    parser.add_argument("--eval_timesteps", type=int, default=20)
    return parser


if __name__ == "__main__":
    import sys

    parser = ArgumentParser()
    add_common_cli(parser)
    add_cli(parser)
    root = sys.argv[1]
    flags = (
        f"--run_name script --buffer_dir {root} --no_log --epochs 1 --batches_per_epoch 2 --timesteps_per_epoch 24 --parallel_actors 2 "
        "--env_mode sync --dloader_workers 0 --batch_size 4 --traj_encoder transformer --memory_size 16 --memory_layers 1 --agent_type multitask"
    )
    args = parser.parse_args(flags.split())
    config = dict(SIZES)
    config["amago.nets.traj_encoders.TformerTrajEncoder.n_heads"] = 2
    tstep_encoder_type = switch_tstep_encoder(config, arch="ff", n_layers=1, d_hidden=16, d_output=16, hide_rl2s=True)
    traj_encoder_type = switch_traj_encoder(
        config, arch=args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers
    )
    agent_type = switch_agent(config, args.agent_type, reward_multiplier=5.0, tau=0.004)
    exploration_type = switch_exploration(config, "egreedy", steps_anneal=100)
    use_config(config, args.configs)
    assert exploration_type is EpsilonGreedy and issubclass(agent_type, Agent.__mro__[1]) and gin.config_str is not None
    group_name = f"{args.run_name}_script"
    for trial in range(args.trials):
        experiment = create_experiment_from_cli(
            args, make_train_env=make_env, make_val_env=make_env, max_seq_len=args.max_seq_len, traj_save_len=args.max_seq_len * 3,
            run_name=f"{args.run_name}_trial_{trial}", tstep_encoder_type=tstep_encoder_type, traj_encoder_type=traj_encoder_type,
            exploration_wrapper_type=exploration_type, agent_type=agent_type, group_name=group_name, val_timesteps_per_epoch=args.eval_timesteps,
            sample_actions=False,
        )  # fmt: skip
        switch_async_mode(experiment, args.mode)
        experiment.start()
        if args.ckpt is not None:
            experiment.load_checkpoint(args.ckpt)
        experiment.learn()
        experiment.evaluate_test(make_env, timesteps=20, render=False)
        experiment.delete_buffer_from_disk()
