"""Growth of costs with size: 1 to 256 actors, sequences of 32 to 2,048 steps, widths 64 to 1,024, 10^3 to 10^6 trajectories.

The "ceiling" of a row is the figure of the smallest size, scaled by the growth of the work: linear in actors, steps and
trajectories, quadratic in width. A ratio of 1 is proportional growth; a higher ratio means that fixed costs are shared.

``python -m benchmarks scaling`` also plots the results into docs/images/scaling.png, or into DIR/scaling.png with
``--out DIR``.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from amago import config
from amago.agent import Agent
from amago.envs import AMAGOEnv, make_pool
from amago.loading import Batch
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.run.optimizer import adamw
from amago.run.rollout import Rollout
from amago.spaces import action_spec, rl2_space
from amago.store import TrajectoryStore
from benchmarks.harness import Row, seconds_per_call
from benchmarks.replay import fill_index

OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)})
ACTIONS: gym.spaces.Discrete = gym.spaces.Discrete(2)
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "scaling.png"


def make_agent(width: int, layers: int, context: int) -> Agent:
    """An agent for CartPole whose networks all have the given width."""
    sizes = {"TformerTrajEncoder.d_model": width, "TformerTrajEncoder.d_ff": 4 * width, "TformerTrajEncoder.n_layers": layers}
    sizes |= {"FFTstepEncoder.d_output": width, "FFTstepEncoder.d_hidden": width, "FFTstepEncoder.n_layers": 1}
    sizes |= {"TformerTrajEncoder.n_heads": max(1, width // 32), "Actor.d_hidden": width, "NCritics.d_hidden": width}
    with config.temporary(sizes):
        return Agent(OBS, rl2_space(action_spec(ACTIONS)), ACTIONS, context, FFTstepEncoder, TformerTrajEncoder)


class Update:
    """An update of `make_agent` on random sequences: losses, gradients, optimizer, target networks."""

    def __init__(self, width: int, layers: int, batch: int, length: int) -> None:
        self.agent = make_agent(width, layers, length)
        self.optimizer = adamw(list(self.agent.trainable_params), 1e-4, 1e-3)
        actions = torch.nn.functional.one_hot(torch.randint(0, 2, (batch, length)), 2).float()
        self.batch = Batch(
            obs={"observation": torch.randn(batch, length + 1, 4)}, rl2s=torch.randn(batch, length + 1, 3), actions=actions,
            rews=torch.randn(batch, length, 1), dones=torch.zeros(batch, length, 1, dtype=torch.bool),
            time_idxs=torch.arange(length + 1)[None, :, None].expand(batch, -1, 1).contiguous(),
            mask=torch.ones(batch, length + 1, 1, dtype=torch.bool),
        )  # fmt: skip

    def __call__(self) -> None:
        self.agent(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.agent.soft_sync_targets()


def best_of(update: Update, rounds: int) -> float:
    """Median milliseconds of a call."""
    update()
    return 1000.0 * median(seconds_per_call(update, 0.0) for _ in range(rounds))


def by_length(sizes: Sequence[int], rounds: int) -> Iterator[tuple[int, float]]:
    """(length, milliseconds of an update on 4 sequences of that length)."""
    for length in sizes:
        yield length, best_of(Update(64, 2, 4, length), rounds)


def by_width(sizes: Sequence[int], rounds: int) -> Iterator[tuple[int, float]]:
    """(width, milliseconds of an update of models of that width on 8 sequences of 64 steps)."""
    for width in sizes:
        yield width, best_of(Update(width, 2, 8, 64), rounds)


def by_actors(sizes: Sequence[int], rounds: int) -> Iterator[tuple[int, float]]:
    """(actors, milliseconds of a step of all actors: a Transformer of width 256 with 3 layers, and CartPole, in one
    process)."""
    agent = make_agent(256, 3, 64).eval()
    for actors in sizes:
        pool = make_pool(lambda: AMAGOEnv(gym.make("CartPole-v1"), env_name="c"), "sync", parallel_actors=actors, seed=0)
        try:
            rollout = Rollout(pool, torch.device("cpu"))
            rollout.reset()
            steps = max(8, 512 // actors)
            rollout.run(agent, steps)
            yield actors, 1000.0 * median(_seconds(partial(rollout.run, agent, steps)) for _ in range(rounds)) / steps
        finally:
            pool.close()


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def by_trajectories(sizes: Sequence[int], rounds: int) -> Iterator[tuple[int, float, float]]:
    """(trajectories, milliseconds to open a store with an index, microseconds to read a slice); 50 per file, 10 steps each."""
    for trajectories in sizes:
        root = Path(tempfile.mkdtemp())
        try:
            fill_index(root / "buffer", max(1, trajectories // 50), 50)
            TrajectoryStore(root / "buffer").refresh()
            seconds, stores = [], []
            for _ in range(rounds):
                store = TrajectoryStore(root / "buffer")
                seconds.append(_seconds(store.refresh))
                stores.append(store)
            view, rng = stores[-1].view(), np.random.default_rng(0)
            drawn = rng.integers(0, len(view), 2000).tolist()
            began = time.perf_counter()
            for i in drawn:
                view.read(i, 2, 7)
            yield len(view), 1000.0 * median(seconds), (time.perf_counter() - began) / len(drawn) * 1e6
        finally:
            shutil.rmtree(root, ignore_errors=True)


def lines(case: str, unit: str, figures: Sequence[tuple[int, float]], power: float = 1.0) -> Iterator[Row]:
    """The rows of one axis, whose work grows with the power ``power`` of the size."""
    first, cost = figures[0]
    for size, ours in figures:
        expected = cost * (size / first) ** power
        yield Row(case.format(size), ours, unit, expected, expected / ours, details={"size": float(size)})


CASES = (
    "{} actors, a step",
    "sequences of {}, an update",
    "{} wide, an update",
    "{} trajectories, opening",
    "{} trajectories, a slice",
)


def rows(options: Namespace) -> Iterator[Row]:
    """The rows of all axes; plots them at the end."""
    small, rounds, found = options.smoke, options.rounds or (1 if options.smoke else 3), []
    axes = {
        CASES[0]: lambda: [("ms", list(by_actors((1, 4) if small else (1, 4, 16, 64, 128, 256), rounds)), 1.0)],
        CASES[1]: lambda: [("ms", list(by_length((8, 16) if small else (32, 64, 128, 256, 512, 1024, 2048), rounds)), 1.0)],
        CASES[2]: lambda: [("ms", list(by_width((32, 64) if small else (64, 128, 256, 512, 1024), rounds)), 2.0)],
        CASES[3]: lambda: _store_axes((100, 200) if small else (1_000, 10_000, 100_000, 1_000_000), rounds),
    }
    for case, measure in axes.items():
        if options.only in case:
            for name, (unit, figures, power) in zip((case, CASES[4]), measure()):
                for row in lines(name, unit, figures, power):
                    found.append(row)
                    yield row
    if found:
        draw(found, Path(options.out) / "scaling.png" if options.out or small else PICTURE)


def _store_axes(sizes: Sequence[int], rounds: int) -> list[tuple[str, list[tuple[int, float]], float]]:
    figures = list(by_trajectories(sizes, rounds))
    return [("ms", [(n, opening) for n, opening, _ in figures], 1.0), ("us", [(n, slice_) for n, _, slice_ in figures], 0.0)]


def draw(found: Sequence[Row], picture: Path) -> None:
    """Plot each axis beside proportional growth, on logarithmic scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.4), layout="constrained")
    titles = ("actors", "steps of a sequence", "width", "trajectories", "trajectories")
    what = ("ms, a step of all actors", "ms, an update", "ms, an update", "ms, opening the store", "us, a slice")
    for axes, case, xlabel, ylabel in zip(figure.subplots(1, 5), CASES, titles, what):
        mine = [row for row in found if row.case == case.format(int(row.details["size"]))]
        if mine:
            sizes = [row.details["size"] for row in mine]
            axes.loglog(sizes, [row.ceiling for row in mine], color="grey", linestyle="--", linewidth=1, label="in proportion")
            axes.loglog(sizes, [row.ours for row in mine], color="#1f5fa8", marker=".", label="measured")
            axes.legend()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if mine and case == CASES[4]:
            axes.set_yscale("linear")
            axes.set_ylim(0.0, 2.0 * max(row.ours for row in mine))
        axes.grid(alpha=0.3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)
