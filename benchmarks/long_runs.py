"""The cost of the runs of docs/long_runs.md: ``python -m benchmarks.long_runs`` prints its tables.

Each run is built by its command (`benchmarks.long_run_cases`). Then

- the operations of an update are counted (`benchmarks.operations`);
- an update is timed with sequences of the real length but a smaller batch, and scaled to the real batch;
- a step of the policy is timed with the real number of actors, whose memories have the mean length over a rollout.

Seconds are processor time of one thread, in float32. The speeds of environments, `Run.env_rate`, were measured separately.
"""

from __future__ import annotations

import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from amago.experiment import Experiment
from amago.spaces import action_spec
from benchmarks.harness import machine
from benchmarks.long_run_cases import RUNS, Run, build, make_batch, observations
from benchmarks.operations import BatchLearner, of_update

# ---- seconds -----------------------------------------------------------------------------------------------------------


def cpu_seconds(work: Callable[[], Any], rounds: int = 2) -> float:
    """The minimum processor time of ``work`` over ``rounds`` calls, after one call to warm up."""
    taken = []
    for _ in range(rounds + 1):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken[1:])


def mean_memory(rollout: int, context: int) -> int:
    """The mean number of remembered steps over steps 0 to ``rollout`` - 1 of a rollout."""
    return sum(min(t, context) for t in range(rollout)) // rollout


def acting_seconds(run: Run, agent: Any, actors: int, remembered: int) -> float:
    """Processor seconds of a step of the policy for all actors, each of which remembers ``remembered`` steps."""
    memory = agent.eval().init_hidden_state(actors, "cpu")
    obs, rl2s = observations(run, actors), torch.zeros(actors, agent.rl2_space.shape[0])

    def act() -> None:
        memory.set_lengths(torch.full_like(memory.lengths, remembered))
        with torch.inference_mode():
            agent.get_actions(obs, rl2s, memory.lengths[:, None].clone(), memory)

    return cpu_seconds(act, 4)


# ---- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The amount of work of a run, and the cost of its parts.

    Attributes:
        title: name of the run.
        actors, vector_steps, updates: number of actors, of steps that all of them take together, and of updates.
        operations: floating-point operations of an update.
        activations: bytes that an update saves for its backward pass, in float32.
        parameters: number of trained parameters.
        update, policy: processor seconds of an update, and of a step of the policy for all actors.
        env_rate: steps per second of one environment.
        batch_bytes, disk: bytes of the observations of a batch, and maximum bytes of the replay buffer.
    """

    title: str
    actors: int
    vector_steps: int
    updates: int
    operations: float
    activations: float
    parameters: int
    update: float
    policy: float
    env_rate: float
    batch_bytes: int
    disk: float

    @property
    def env_steps(self) -> int:
        return self.actors * self.vector_steps

    def hours_here(self) -> tuple[float, float, float]:
        """Hours of updates, policy and environments on one core of this machine."""
        updates, policy = self.updates * self.update, self.vector_steps * self.policy
        return updates / 3600, policy / 3600, self.env_steps / self.env_rate / 3600

    def hours_on_gpu(self, tflops: float, policy_ms: float, cores: int) -> tuple[float, float, float]:
        """The same on a GPU with assumed speeds, see ``--tflops``, ``--policy_ms`` and ``--cores``."""
        updates, policy = self.updates * self.operations / (tflops * 1e12), self.vector_steps * policy_ms / 1e3
        return updates / 3600, policy / 3600, self.env_steps / (self.env_rate * cores) / 3600


def workload(experiment: Experiment) -> tuple[int, int]:
    """The number of steps of each actor, in training and evaluation, and of updates."""
    e, every = experiment, experiment.val_interval
    evaluations = 0 if every is None else -(-e.epochs // every)
    steps = e.epochs * int(e.train_timesteps_per_epoch or 0) + evaluations * e.val_timesteps_per_epoch
    return steps, int(e.epochs - e.start_learning_at_epoch) * e.train_batches_per_epoch


def measure(run: Run, timesteps: int, *more: str) -> Cost:
    """The cost of a run, from a batch of about ``timesteps``. Arguments in ``more`` override those of the run."""
    experiment, agent = build(run, *more)
    length, batch, actors = experiment.max_seq_len, experiment.batch_size, experiment.parallel_actors
    spec, dataset = action_spec(run.actions), experiment.dataset
    operations, activations = of_update(agent, partial(make_batch, run), batch, length)
    policy = acting_seconds(run, agent, actors, mean_memory(run.rollout, length))
    sequences = max(1, min(batch, timesteps // length))
    learner = BatchLearner(agent, make_batch(run, sequences, length))
    observed = sum(int(s.low.nbytes) for s in run.obs.values())
    step_bytes = observed + spec.stored_dim * spec.stored_dtype.itemsize + 5  # reward and done
    longest = min(run.rollout, experiment.traj_save_len)
    kept = min(dataset.dset_max_size * longest, dataset.dset_max_steps)  # type: ignore[union-attr]
    return Cost(
        run.title, actors, *workload(experiment), operations, activations, sum(p.numel() for p in agent.trainable_params),
        cpu_seconds(learner.update) * batch / sequences, policy, run.env_rate, batch * (length + 1) * observed, kept * step_bytes,
    )  # fmt: skip


def hours(*parts: float) -> str:
    """The parts and their sum as text."""
    shown = [f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in (*parts, sum(parts))]
    return f"{' + '.join(shown[:-1])} = **{shown[-1]}**"


def table(costs: list[Cost], tflops: float, policy_ms: float, cores: int) -> str:
    """The two tables of docs/long_runs.md."""
    counted = [
        "| run | environment steps | updates | parameters | operations of an update | backward finds | a batch | buffer, at most |"
    ]
    timed = ["| run | an update | policy's step, all actors | hours on one core | hours on a GPU, assumed |"]
    for head in (counted, timed):
        head.append("| " + "--- | " * (head[0].count("|") - 2) + "--- |")
    for c in costs:
        work = (
            f"{c.env_steps / 1e6:.0f} million | {c.updates:,} | {c.parameters / 1e6:.1f} million | {c.operations / 1e12:.2f} T"
        )
        room = f"{c.activations / 1e9:.1f} GB | {c.batch_bytes / 1e6:.1f} MB | {c.disk / 1e9:.0f} GB"
        counted.append(f"| {c.title} | {work} | {room} |")
        here, gpu = hours(*c.hours_here()), hours(*c.hours_on_gpu(tflops, policy_ms, cores))
        timed.append(f"| {c.title} | {c.update:.1f} s | {1e3 * c.policy:.0f} ms | {here} | {gpu} |")
    return "\n".join([*counted, "", *timed])


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.long_runs", formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the runs whose name contains this")
    parser.add_argument("--timesteps", type=int, default=1024, help="approximate timesteps of the batch that is timed")
    parser.add_argument(
        "--tflops", type=float, default=20.0, help="assumed sustained speed of a GPU, 10^12 operations per second"
    )
    parser.add_argument(
        "--policy_ms", type=float, default=5.0, help="assumed milliseconds of a policy step for all actors on a GPU"
    )
    parser.add_argument("--cores", type=int, default=8, help="assumed number of cores that step environments beside a GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, one thread, torch {torch.__version__}", flush=True)
    costs = [measure(run, options.timesteps) for run in RUNS if options.only in run.name]
    print(table(costs, options.tflops, options.policy_ms, options.cores))


if __name__ == "__main__":
    main()
