"""What the runs of docs/long_runs.md cost: ``python -m benchmarks.long_runs`` prints its tables.

Each run is built as its command builds it (`benchmarks.long_run_cases`). Then

- the operations of an update are counted (`benchmarks.operations`);
- an update is timed at the real length with fewer sequences, and taken as many times as the real batch is larger;
- a step of the policy is timed with the real number of actors, each remembering as much as it does in the mean step of a rollout.

Seconds are processor time of one thread, in float32. Steps a second of the environments are figures of `Run.env_rate`, measured apart.
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
    """Processor time, the least of a few rounds after one to warm up."""
    taken = []
    for _ in range(rounds + 1):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken[1:])


def mean_memory(rollout: int, context: int) -> int:
    """Steps that an actor remembers in the mean step of a rollout, which is step 0, 1, ... ``rollout`` - 1."""
    return sum(min(t, context) for t in range(rollout)) // rollout


def acting_seconds(run: Run, agent: Any, actors: int, remembered: int) -> float:
    """A step of the policy for all actors."""
    memory = agent.eval().init_hidden_state(actors, "cpu")
    obs, rl2s = observations(run, actors), torch.zeros(actors, agent.rl2_space.shape[0])

    def act() -> None:
        memory.lengths.fill_(remembered)
        memory.host_lengths[:] = remembered
        with torch.inference_mode():
            agent.get_actions(obs, rl2s, memory.lengths[:, None].clone(), memory)

    return cpu_seconds(act, 4)


# ---- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of a run: ``vector_steps`` of all ``actors`` at once and ``updates``, and what one of each takes.

    Args:
        operations, activations, parameters: of an update; bytes that its backward pass finds in float32; numbers that are trained.
        update, policy: processor seconds of an update, and of a step of the policy for all actors.
        env_rate: steps a second of one environment.
        batch_bytes, disk: observations of a batch, and the whole replay buffer at most.
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
        """One core: updates, policy, environments."""
        updates, policy = self.updates * self.update, self.vector_steps * self.policy
        return updates / 3600, policy / 3600, self.env_steps / self.env_rate / 3600

    def hours_on_gpu(self, tflops: float, policy_ms: float, cores: int) -> tuple[float, float, float]:
        """The same under assumptions: operations a second, a step of the policy, and cores that share the environments."""
        updates, policy = self.updates * self.operations / (tflops * 1e12), self.vector_steps * policy_ms / 1e3
        return updates / 3600, policy / 3600, self.env_steps / (self.env_rate * cores) / 3600


def workload(experiment: Experiment) -> tuple[int, int]:
    """Steps of each actor (training and evaluation), and updates."""
    e, every = experiment, experiment.val_interval
    evaluations = 0 if every is None else -(-e.epochs // every)
    steps = e.epochs * int(e.train_timesteps_per_epoch or 0) + evaluations * e.val_timesteps_per_epoch
    return steps, int(e.epochs - e.start_learning_at_epoch) * e.train_batches_per_epoch


def measure(run: Run, timesteps: int, *more: str) -> Cost:
    """What a run costs; about ``timesteps`` are in the batch that is timed, ``more`` arguments of its script win."""
    experiment, agent = build(run, *more)
    length, batch, actors = experiment.max_seq_len, experiment.batch_size, experiment.parallel_actors
    spec, dataset = action_spec(run.actions), experiment.dataset
    operations, activations = of_update(agent, partial(make_batch, run), batch, length)
    policy = acting_seconds(run, agent, actors, mean_memory(run.rollout, length))
    sequences = max(1, min(batch, timesteps // length))
    learner = BatchLearner(agent, make_batch(run, sequences, length))
    observed = sum(int(s.low.nbytes) for s in run.obs.values())
    step_bytes = observed + spec.stored_dim * spec.stored_dtype.itemsize + 5  # reward and done
    kept = dataset.dset_max_size * min(run.rollout, experiment.traj_save_len)  # type: ignore[union-attr]
    return Cost(
        run.title, actors, *workload(experiment), operations, activations, sum(p.numel() for p in agent.trainable_params),
        cpu_seconds(learner.update) * batch / sequences, policy, run.env_rate, batch * (length + 1) * observed, kept * step_bytes,
    )  # fmt: skip


def hours(*parts: float) -> str:
    """Terms and sum."""
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
    parser.add_argument("--timesteps", type=int, default=1024, help="in the batch that is timed, about")
    parser.add_argument("--tflops", type=float, default=20.0, help="assumed of a GPU: tera operations a second, sustained")
    parser.add_argument("--policy_ms", type=float, default=5.0, help="assumed of a GPU: a step of the policy for all actors")
    parser.add_argument("--cores", type=int, default=8, help="assumed beside a GPU: cores that step environments")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, one thread, torch {torch.__version__}", flush=True)
    costs = [measure(run, options.timesteps) for run in RUNS if options.only in run.name]
    print(table(costs, options.tflops, options.policy_ms, options.cores))


if __name__ == "__main__":
    main()
