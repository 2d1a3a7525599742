"""What a T-Maze of so many steps costs, by sequence model, on one thread.

    python -m benchmarks.suite.tmaze_cost

For each length: processor milliseconds of an update on 4 sequences that are whole rollouts, and of one step of 16 actors, averaged over a whole rollout;
the networks are those of `benchmarks.suite.tmaze` (one layer, 64 wide).
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

import torch

from amago import cli_utils, config
from amago.agent import Agent
from amago.envs import AMAGOEnv, make_pool
from amago.envs.builtin.tmaze import TMazePassive
from amago.loading import Batch
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.run.optimizer import adamw
from amago.run.rollout import Rollout
from benchmarks.suite.tmaze import HORIZONS, MODELS

WIDTH, BATCH, ACTORS = 64, 4, 16


def make_agent(env: AMAGOEnv, model: str, length: int) -> Agent:
    """The agent of `benchmarks.suite.tmaze`, with sequences of ``length`` steps."""
    sizes = {"FFTstepEncoder.n_layers": 1, "FFTstepEncoder.d_hidden": WIDTH, "FFTstepEncoder.d_output": WIDTH}
    sizes |= {"Actor.d_hidden": WIDTH, "NCritics.d_hidden": WIDTH, "FFTstepEncoder.normalize_inputs": False}
    traj = cli_utils.switch_traj_encoder(sizes, model, memory_size=WIDTH, layers=1)
    with config.temporary({}):
        cli_utils.use_config(sizes, ["zoo/tmaze"])
        return Agent(env.observation_space, env.rl2_space, env.action_space, length, FFTstepEncoder, traj)


def milliseconds_of_an_update(env: AMAGOEnv, agent: Agent, length: int) -> float:
    """On `BATCH` sequences of random inputs, after a first update."""
    width = env.action_spec.dim
    actions = torch.nn.functional.one_hot(torch.randint(0, width, (BATCH, length)), width).float()
    batch = Batch(
        obs={k: torch.randn(BATCH, length + 1, *space.shape) for k, space in env.observation_space.spaces.items()},
        rl2s=torch.randn(BATCH, length + 1, 1 + width), actions=actions, rews=torch.randn(BATCH, length, 1),
        dones=torch.zeros(BATCH, length, 1, dtype=torch.bool), mask=torch.ones(BATCH, length + 1, 1, dtype=torch.bool),
        time_idxs=torch.arange(length + 1)[None, :, None].expand(BATCH, -1, 1).contiguous(),
    )  # fmt: skip
    optimizer = adamw(list(agent.trainable_params), 1e-4, 1e-3)

    def update() -> None:
        agent(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        agent.soft_sync_targets()

    update()
    began, calls = time.process_time(), 0
    while time.process_time() - began < 2.0 or calls < 5:
        update()
        calls += 1
    return 1000.0 * (time.process_time() - began) / calls


def milliseconds_of_a_step(agent: Agent, length: int) -> float:
    """Of `ACTORS` actors in one process, environments included."""
    pool = make_pool(lambda: AMAGOEnv(TMazePassive(length - 1), env_name="tmaze"), "sync", parallel_actors=ACTORS, seed=0)
    try:
        rollout = Rollout(pool, torch.device("cpu"))
        rollout.reset()
        rollout.run(agent.eval(), min(length, 100))
        rollout.reset()
        began = time.process_time()
        rollout.run(agent, length)
        return 1000.0 * (time.process_time() - began) / length
    finally:
        pool.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.suite.tmaze_cost", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=list(HORIZONS), help="steps of a rollout")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="sequence models")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| steps | " + " | ".join(f"{m}: update, ms | a step, ms" for m in args.models) + " |")
    print("| --- " * (1 + 2 * len(args.models)) + "|")
    for length in args.lengths:
        cells = []
        for model in args.models:
            torch.manual_seed(0)
            env = AMAGOEnv(TMazePassive(length - 1), env_name="tmaze")
            agent = make_agent(env, model, length)
            cells += [
                f"{milliseconds_of_a_step(agent, length):.2f}",
                f"{milliseconds_of_an_update(env, agent.train(), length):.0f}",
            ]
        print(
            f"| {length:,} | " + " | ".join(f"{update} | {step}" for step, update in zip(cells[::2], cells[1::2])) + " |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
