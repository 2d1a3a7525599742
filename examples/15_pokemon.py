"""Pokemon battles: learn from recorded battles of scripted players, later also from battles against them.

python examples/15_pokemon.py --battle_format gen1randombattle --record 1000 --run_name pokemon --buffer_dir runs

Needs `pip install 'amago[pokemon]'`, Node.js, and `make showdown`. This script starts and stops the server.
"""

from argparse import ArgumentParser, Namespace
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
from support.pokemon import OPPONENTS, PokemonBattle, ShowdownServer, generation

from amago import cli_utils
from amago.envs import AMAGOEnv, SequenceWrapper
from amago.experiment import Experiment


def add_cli(parser: ArgumentParser) -> None:
    parser.add_argument("--battle_format", default="gen1randombattle", help="one of Showdown's formats of single battles")
    parser.add_argument("--opponents", nargs="+", choices=OPPONENTS, default=list(OPPONENTS), help="scripted opponents")
    parser.add_argument(
        "--teams",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="teams in Showdown's export format, for formats without random teams",
    )
    parser.add_argument("--shaping", type=float, default=0.5, help="largest shaping reward, relative to a victory")
    parser.add_argument("--max_steps", type=int, default=200, help="choices after which a battle is forfeited")
    parser.add_argument(
        "--record",
        type=cli_utils.whole_number,
        default=1000,
        help="battles to record, including those that the run already has",
    )
    parser.add_argument(
        "--players", nargs="+", choices=OPPONENTS, default=list(OPPONENTS), help="players of the recorded battles"
    )
    parser.add_argument("--online_after", type=cli_utils.whole_number, default=20, help="first epoch in which the agent plays")
    parser.add_argument(
        "--showdown", type=Path, default=None, metavar="DIR", help="directory of the npm package; None: search for it"
    )
    parser.set_defaults(
        agent_type="multitask", parallel_actors=16, timesteps_per_epoch=200, grads_per_epoch=200, epochs=200, memory_size=128,
        memory_layers=2, learning_rate=3e-4,
    )  # fmt: skip


class MakeBattle:
    """A picklable function that makes an environment."""

    def __init__(self, args: Namespace, url: str) -> None:
        teams = [file.read_text(encoding="utf-8") for file in args.teams]
        self.arguments = (url, args.battle_format, args.opponents, args.shaping, args.max_steps, teams)

    def __call__(self) -> AMAGOEnv:
        return AMAGOEnv(PokemonBattle(*self.arguments))


def record(args: Namespace, make_env: MakeBattle) -> None:
    """Record battles into ``buffer/protected`` of the run, which is sampled like the rest and never deleted."""
    protected = Path(args.buffer_dir) / args.run_name / "buffer" / "protected"
    done = sum(int(file.stem.rpartition("-n")[2]) for file in protected.glob("*.safetensors"))
    if done >= args.record:
        return
    protected.mkdir(parents=True, exist_ok=True)
    inner = make_env()
    env = SequenceWrapper(inner, save_trajs_to=protected, save_trajs_as="segments")
    won: dict[str, list[float]] = {player: [] for player in args.players}
    try:
        for i, player in zip(range(done, args.record), cycle(args.players)):
            env.reset(seed=None if args.seed is None else args.seed + i)
            over = False
            while not over:
                _, _, terminated, truncated, _ = env.step(inner.env.scripted_action(player))
                over = bool(terminated.item() or truncated.item())
            won[player].append(float(bool(inner.env.battle.won)))
    finally:
        env.close()
    print("recorded battles:", ", ".join(f"{name} won {np.mean(w):.0%} of {len(w)}" for name, w in won.items() if w))


def make_experiment(args: Namespace, url: str) -> Experiment:
    make_env = MakeBattle(args, url)
    make_env()  # raises an error for wrong arguments before recording
    if args.mode != "collect":
        record(args, make_env)
    config: dict = {"ActionMask.key": "action_mask"}  # illegal choices have probability 0, in acting, exploration and losses
    tstep = cli_utils.switch_tstep_encoder(config, "ff", n_layers=2, d_hidden=256, d_output=128)
    traj = cli_utils.switch_traj_encoder(config, args.traj_encoder, memory_size=args.memory_size, layers=args.memory_layers)
    agent = cli_utils.switch_agent(config, args.agent_type)
    explore = cli_utils.switch_exploration(config, "egreedy", eps_start=0.2, eps_end=0.02)
    cli_utils.use_config(config, ["zoo/pokemon", *args.configs])
    return cli_utils.create_experiment_from_cli(
        args, make_env, make_env, max_seq_len=min(64, args.max_steps), val_timesteps_per_epoch=args.max_steps + 1,
        tstep_encoder_type=tstep, traj_encoder_type=traj, agent_type=agent, exploration_wrapper_type=explore,
        start_collecting_at_epoch=args.online_after, padded_sampling="both", group_name=f"pokemon_{args.battle_format}",
    )  # fmt: skip


def test(experiment: Experiment) -> None:
    cli_utils.evaluate_after_training(experiment, 2 * experiment.val_timesteps_per_epoch)


if __name__ == "__main__":
    args = cli_utils.parse_args(__doc__, add_cli)
    generation(args.battle_format)  # raises an error for a wrong format before the server starts
    with ShowdownServer(args.showdown) as server:
        cli_utils.run_trials(args, partial(make_experiment, url=server.url), test)
