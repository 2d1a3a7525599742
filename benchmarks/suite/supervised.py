"""What sequence models learn from labels alone, apart from reinforcement learning, on one thread.

    python -m benchmarks.suite.supervised velocity
    python -m benchmarks.suite.supervised sign --length 300 --models transformer gru

velocity: both speeds of a cart and its pole from windows of 16 of their positions; the mean squared error after so many updates, where 1
is that of a guess. sign: the sign of the first of ``--length`` steps, asked for at the last; the share of right answers.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amago.nets.traj_encoders import GRUTrajEncoder, MinGRUTrajEncoder, TformerTrajEncoder, TrajEncoder

WIDTH, WINDOW, BATCH = 64, 16, 48
WARM = 4
"""Steps at the start of a window that do not count: nobody can know a speed from one position."""
LONGEST = 200
"""Steps of a rollout of the pole, at most."""
CHECKS = (60, 125, 250, 500)
AVERAGED = 25
"""Updates whose measures are averaged."""
Examples: TypeAlias = Iterator[tuple[Tensor, Tensor, Tensor]]
"""Inputs (B, L, D), time indices (B, L, 1), labels."""


def _transformer(**options: Any) -> Callable[[int], TrajEncoder]:
    size = {"d_model": WIDTH, "n_heads": 4, "d_ff": 4 * WIDTH, "n_layers": 1}
    return lambda length: TformerTrajEncoder(WIDTH, length, **size, **options)


_NO_DROPOUT = {"dropout_ff": 0.0, "dropout_emb": 0.0}
MODELS: dict[str, Callable[[int], TrajEncoder]] = {
    "gru": lambda length: GRUTrajEncoder(WIDTH, length, WIDTH, 1, WIDTH),
    "mingru": lambda length: MinGRUTrajEncoder(WIDTH, length, d_model=WIDTH, n_layers=1),
    "transformer": _transformer(),
    "transformer_no_dropout": _transformer(**_NO_DROPOUT),
    "transformer_rope": _transformer(pos_emb="rope"),
    "transformer_rope_no_dropout": _transformer(pos_emb="rope", **_NO_DROPOUT),
    "transformer_plain_rope": _transformer(pos_emb="rope", sigma_reparam=False, **_NO_DROPOUT),
}
"""By name, for sequences of at most so many steps; one layer, 64 wide. "plain": without sigma-reparametrised layers."""


# ---- tasks -----------------------------------------------------------------------------------------------------------------


def pole_rollouts(number: int, shortest: int, rng: np.random.Generator) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Observations and actions of CartPole-v1 under controllers of various gains and noise, of `shortest` to `LONGEST` steps."""
    env, found = gym.make("CartPole-v1"), []
    while len(found) < number:
        obs, _ = env.reset(seed=int(rng.integers(2**31)))
        noise, gain = rng.uniform(0.05, 0.6), rng.uniform(0.3, 1.5)
        seen, actions, over = [], [], False
        while not over and len(seen) < LONGEST:
            wanted = obs[2] + gain * obs[3] + 0.05 * obs[0] + 0.1 * obs[1] > 0
            action = int(rng.integers(2)) if rng.random() < noise else int(wanted)
            seen.append(obs)
            actions.append(action)
            obs, _, over, _, _ = env.step(action)
        if len(seen) >= shortest:
            found.append((np.array(seen, np.float32), np.array(actions)))
    return found


def velocity(rng: np.random.Generator, length: int) -> Examples:
    """Windows of positions and of the actions before them; labels (B, L, 2), speeds in units of their standard deviation."""
    rollouts = pole_rollouts(300, length, rng)
    scale = np.concatenate([obs for obs, _ in rollouts]).std(axis=0)
    while True:
        inputs = np.zeros((BATCH, length, 4), np.float32)
        labels, times = np.zeros((BATCH, length, 2), np.float32), np.zeros((BATCH, length, 1), np.int64)
        for i in range(BATCH):
            obs, actions = rollouts[rng.integers(len(rollouts))]
            start = rng.integers(len(obs) - length + 1)
            window, before = obs[start : start + length] / scale, np.concatenate([[0], actions])[start : start + length]
            inputs[i] = np.column_stack([window[:, [0, 2]], before == 0, before == 1])
            labels[i], times[i, :, 0] = window[:, [1, 3]], np.arange(start, start + length)
        yield torch.from_numpy(inputs), torch.from_numpy(times), torch.from_numpy(labels)


def sign(rng: np.random.Generator, length: int) -> Examples:
    """A sign in the first of ``length`` steps; labels (B,), 0 or 1."""
    times = torch.arange(length)[None, :, None].expand(BATCH, -1, -1)
    while True:
        labels = torch.from_numpy(rng.integers(2, size=BATCH))
        inputs = torch.zeros(BATCH, length, 4)
        inputs[:, 0, 0] = 2.0 * labels - 1.0
        inputs[:, :, 1] = torch.arange(length) / length
        yield inputs, times, labels


def _error(out: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    loss = (out - labels)[:, WARM:].square().mean()
    return loss, loss.item()


def _share_right(out: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    last = out[:, -1]
    return nn.functional.cross_entropy(last, labels), (last.argmax(-1) == labels).float().mean().item()


TASKS = {"velocity": (velocity, _error), "sign": (sign, _share_right)}


# ---- training --------------------------------------------------------------------------------------------------------------


def learn(task: str, model: str, length: int, updates: int, rate: float, seed: int) -> dict[int, float]:
    """The measure of a task, mean of the last `AVERAGED` updates, after each number of updates in `CHECKS` and at the end."""
    examples, measure = TASKS[task]
    torch.manual_seed(seed)
    parts = nn.ModuleList([
        nn.Sequential(nn.Linear(4, 2 * WIDTH), nn.LeakyReLU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
        MODELS[model](length),
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LeakyReLU(), nn.Linear(2 * WIDTH, 2)),
    ])  # fmt: skip
    embed, remember, head = parts
    optimizer = torch.optim.AdamW(parts.parameters(), lr=rate, weight_decay=1e-4)
    drawn, measures, found = examples(np.random.default_rng(seed), length), [], {}
    for update in range(1, updates + 1):
        inputs, times, labels = next(drawn)
        loss, value = measure(head(remember(embed(inputs), times)[0]), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        measures.append(value)
        if update in CHECKS or update == updates:
            found[update] = float(np.mean(measures[-AVERAGED:]))
    return found


def table(task: str, models: Sequence[str], length: int, updates: int, rate: float, seeds: int) -> str:
    """One row for each model: the measure after so many updates, by seed."""
    shown = [u for u in CHECKS if u < updates] + [updates]
    lines = [f"| model | {' | '.join(f'{u:,}' for u in shown)} |", "| --- " * (len(shown) + 1) + "|"]
    for model in models:
        found = [learn(task, model, length, updates, rate, seed) for seed in range(seeds)]
        cells = (", ".join(f"{one[u]:.3f}" for one in found) for u in shown)
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.suite.supervised", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS, help="what is to be learned")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--length", type=int, default=WINDOW, help="steps of a sequence (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=CHECKS[-1], help="of 48 sequences (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=6e-4, help="learning rate (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0 to N - 1 (default: %(default)s)")
    args = parser.parse_args(argv)
    shortest, longest = (WARM + 1, LONGEST) if args.task == "velocity" else (1, 10**6)
    if not shortest <= args.length <= longest:
        parser.error(f"--length must lie in [{shortest}, {longest}] for {args.task}, got {args.length}")
    if args.updates < 1 or args.seeds < 1:
        parser.error(f"--updates and --seeds must be at least 1, got {args.updates} and {args.seeds}")
    torch.set_num_threads(1)
    print(table(args.task, args.models, args.length, args.updates, args.rate, args.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
