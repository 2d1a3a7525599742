"""Dark Key-To-Door: collect a hidden key and open a hidden door as often as possible in a fixed number of steps (meta-RL).

python examples/05_dark_key_door.py --room_size 5 --episode_length 20 --meta_horizon 100 --run_name door --buffer_dir runs
"""

from argparse import ArgumentParser, Namespace

from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin.toy_gym import RoomKeyDoor
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--room_size", type=int, default=5, help="width and height of the room")
    parser.add_argument("--episode_length", type=int, default=20, help="steps after which the agent returns to the start")
    parser.add_argument("--meta_horizon", type=int, default=100, help="steps in a rollout")
    parser.add_argument(
        "--light", "--light_room_observation", action="store_true", help="observe the positions of key and door"
    )
    parser.add_argument("--randomize_actions", action="store_true", help="permute the actions in each rollout")
    parser.set_defaults(
        parallel_actors=64, timesteps_per_epoch=None, grads_per_epoch=50, epochs=64, memory_size=64, memory_layers=2,
        learning_rate=1e-3,
    )  # fmt: skip


def make_experiment(args: Namespace) -> Experiment:
    def make_env() -> AMAGOEnv:
        room = RoomKeyDoor(
            dark=not args.light, size=args.room_size, max_episode_steps=args.episode_length,
            meta_rollout_horizon=args.meta_horizon, randomize_actions=args.randomize_actions,
        )  # fmt: skip
        return AMAGOEnv(room, env_name=f"dark_key_door_{args.room_size}x{args.room_size}")

    args.timesteps_per_epoch = args.timesteps_per_epoch or args.meta_horizon
    config: dict = {}
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=1, d_hidden=128, d_output=64)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type, tau=0.01, gamma=0.97)
    config |= {"Actor.d_hidden": 128, "NCritics.d_hidden": 128, "TformerTrajEncoder.n_heads": 4}
    config |= {"Multigammas.discrete": [0.7, 0.9]}  # the next reward is at most a few attempts away
    explore = cli_utils.switch_exploration(config, "bilevel", rollout_horizon=args.meta_horizon)
    cli_utils.use_config(config, args.configs)
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=args.meta_horizon, val_timesteps_per_epoch=2 * args.meta_horizon + 1,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        group_name=f"dark_key_door_{args.room_size}x{args.room_size}",
    )  # fmt: skip


if __name__ == "__main__":
    cli_utils.main(__doc__, add_cli, make_experiment)
