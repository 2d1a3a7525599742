"""POPGym's 24 environments that have published figures (`examples/03_popgym_suite.py`), on one thread each.

    python -m benchmarks.suite.popgym run --seeds 2 --jobs 2
    python -m benchmarks.suite.popgym table --picture docs/images/popgym.png

Published are Morad et al. 2023 (arXiv 2303.01859), appendix B: PPO for 15 million steps, the best epoch's mean return, mean of three trials;
a GRU, and the best of 13 memory models. A run ends early when three evaluations in a row have reached nearly all there is to reach (0.99;
0.999 for the poles). Runs that are done are not repeated, and interrupted ones continue.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.suite.board import Board, Entry, main
from benchmarks.suite.example import read
from benchmarks.suite.pictures import panels
from benchmarks.suite.statistics import interpolated

STEPS = 15e6
"""Of the published figures."""


@dataclass(frozen=True)
class Game:
    """An environment, and what was published of it.

    Attributes:
        name: of the environment.
        gru, best: return of a GRU, and of the best of 13 models, after 15 million steps.
        steps: of a rollout, at most.
        settings: arguments of the example.
    """

    name: str
    gru: float
    best: float
    steps: int
    settings: str


CARDS = "--configs zoo/popgym --parallel_actors 32 --grads_per_epoch 50"
ANSWERS = "--configs zoo/popgym zoo/popgym_answers --parallel_actors 32 --grads_per_epoch 50"
_LONG = "--configs zoo/popgym zoo/popgym_long --parallel_actors 32 --grads_per_epoch 50"
_LONG_ANSWERS = "--configs zoo/popgym zoo/popgym_answers zoo/popgym_long --parallel_actors 32 --grads_per_epoch 50"
_FAR_ANSWERS = _LONG_ANSWERS.replace("zoo/popgym_long", "zoo/popgym_long zoo/popgym_attention")
_LONG_BANDIT = f"{_LONG} --traj_encoder gru --memory_layers 1"
_POLES = "--configs zoo/popgym zoo/popgym_cartpole --memory_layers 1 --parallel_actors 16 --grads_per_epoch 125 --batch_size 48"
_GRU_POLES = (
    "--configs zoo/popgym zoo/popgym_cartpole --traj_encoder gru --memory_layers 1 --parallel_actors 48 --grads_per_epoch 125 "
    "--batch_size 24 --max_seq_len 64 --learning_rate 5e-4"
)
_NOISY_POLES = (
    "--configs zoo/popgym zoo/popgym_cartpole zoo/popgym_noisy_poles --traj_encoder gru --memory_layers 1 --parallel_actors 48 "
    "--timesteps_per_epoch 500 --grads_per_epoch 125 --batch_size 48 --max_seq_len 64 --learning_rate 5e-4 --eval_timesteps 2000 "
    "--epochs 32 --val_interval 4"
)
GAMES = (
    Game("AutoencodeEasy", -0.283, -0.283, 103, f"{ANSWERS} --epochs 50 --val_interval 5"),
    Game("AutoencodeMedium", -0.425, -0.420, 207, f"{ANSWERS} --epochs 120 --val_interval 5"),
    Game("AutoencodeHard", -0.456, -0.448, 311, f"{_FAR_ANSWERS} --epochs 120 --val_interval 5 --batch_size 16"),
    Game("CountRecallEasy", 0.177, 0.509, 51, f"{ANSWERS} --epochs 100 --val_interval 5"),
    Game("CountRecallMedium", -0.528, -0.519, 103, f"{ANSWERS} --epochs 120 --val_interval 5"),
    Game("CountRecallHard", -0.475, -0.470, 207, f"{_LONG_ANSWERS} --epochs 120 --val_interval 5 --batch_size 16"),
    Game("HigherLowerEasy", 0.529, 0.529, 51, f"{ANSWERS} --epochs 100 --val_interval 5"),
    Game("HigherLowerMedium", 0.511, 0.513, 103, f"{ANSWERS} --epochs 100 --val_interval 5"),
    Game("HigherLowerHard", 0.506, 0.509, 155, f"{ANSWERS} --epochs 100 --val_interval 5"),
    Game("MultiarmedBanditEasy", 0.619, 0.631, 200, f"{_LONG_BANDIT} --epochs 60 --val_interval 3"),
    Game("MultiarmedBanditMedium", 0.538, 0.598, 400, f"{_LONG_BANDIT} --epochs 60 --val_interval 3 --batch_size 12"),
    Game("MultiarmedBanditHard", 0.516, 0.574, 600, f"{_LONG_BANDIT} --epochs 80 --val_interval 4 --batch_size 8"),
    Game("NoisyPositionOnlyCartPoleEasy", 0.995, 0.995, 200, f"{_GRU_POLES} --epochs 60 --val_interval 5"),
    Game("NoisyPositionOnlyCartPoleMedium", 0.642, 0.659, 200, _NOISY_POLES),
    Game("NoisyPositionOnlyCartPoleHard", 0.390, 0.404, 200, _NOISY_POLES),
    Game("PositionOnlyCartPoleEasy", 1.0, 1.0, 200, f"{_POLES} --max_seq_len 16 --epochs 40 --val_interval 5"),
    Game("PositionOnlyCartPoleMedium", 1.0, 1.0, 400, f"{_GRU_POLES} --epochs 80 --val_interval 5"),
    Game("PositionOnlyCartPoleHard", 1.0, 1.0, 600, f"{_GRU_POLES} --epochs 80 --val_interval 5"),
    Game("RepeatFirstEasy", 1.0, 1.0, 51, f"{CARDS} --epochs 20 --val_interval 2"),
    Game("RepeatFirstMedium", 1.0, 1.0, 415, f"{CARDS} --epochs 30 --val_interval 2 --batch_size 8"),
    Game("RepeatFirstHard", 0.940, 0.969, 831, f"{_LONG} --epochs 30 --val_interval 2 --batch_size 4 --max_seq_len 831"),
    Game("RepeatPreviousEasy", 1.0, 1.0, 51, f"{CARDS} --epochs 20 --val_interval 2"),
    Game("RepeatPreviousMedium", -0.315, 0.789, 103, f"{CARDS} --epochs 60 --val_interval 3"),
    Game("RepeatPreviousHard", -0.428, 0.191, 155, f"{CARDS} --epochs 80 --val_interval 4 --batch_size 16"),
)


# ---- tables ----------------------------------------------------------------------------------------------------------------


def table(results: Path) -> str:
    """One row for each game with a finished run, and how many are at least as good as the best of 13."""
    lines = [
        "| environment | GRU, 15M steps | best of 13, 15M | ours, greedy, by seed | sampled | best evaluation | its weights | steps "
        "| CPU s |",
        "| --- " * 9 + "|",
    ]
    reached = []
    for game in GAMES:
        found = read(results / game.name)
        if not found:
            continue
        last = float(np.mean([max(r.greedy, r.sampled) for r in found]))
        kept = float(np.mean([max(r.greedy, r.sampled, -np.inf if r.best is None else r.best) for r in found]))
        least = game.best - 0.005  # published figures have two or three digits
        marks = ["**" if score >= least else "" for score in (last, kept)]
        if any(marks):
            reached.append(game.name)
        cells = [", ".join(f"{getattr(r, k):.3f}" for r in found) for k in ("greedy", "sampled")]
        tops = ", ".join(f"{max(p.score for p in r.curve):.3f}" for r in found)
        anew = ", ".join(f"{r.best:.3f}" for r in found if r.best is not None)
        steps = max(r.steps for r in found)
        lines.append(
            f"| {game.name} | {game.gru:g} | {game.best:g} | {marks[0]}{cells[0]}{marks[0]} | {cells[1]} | {tops} "
            f"| {marks[1] + anew + marks[1] if anew else ''} | {steps / 1e6:.2f}M (1/{STEPS / steps:.0f}) "
            f"| {', '.join(f'{r.cpu:.0f}' for r in found)} |"
        )
    lines += ["", f"At least the best of 13: {len(reached)} of {len(lines) - 2} that were trained, of {len(GAMES)}."]
    return "\n".join(lines)


def draw(results: Path, path: Path) -> None:
    """Return against environment steps, a panel for each game; the published figures are lines."""
    shown = [(game, found) for game in GAMES if (found := read(results / game.name))]
    with panels(path, len(shown), 6, (2.9, 2.2), "million environment steps") as axes:
        for (game, found), panel in zip(shown, axes):
            for run in found:
                x = np.linspace(0.0, run.curve[-1].steps, 100)
                panel.plot(x / 1e6, interpolated(run.curve, x, "steps"), color="tab:blue", linewidth=1.4)
            panel.axhline(game.best, color="black", linewidth=0.9, linestyle="--", label="best of 13, 15M steps")
            panel.axhline(game.gru, color="grey", linewidth=0.9, linestyle=":", label="GRU, 15M steps")
            panel.set_title(f"{game.name} ({len(found)})", fontsize=7)
        axes[0].legend(fontsize=6)


# ---- the command -----------------------------------------------------------------------------------------------------------


def _entry(game: Game) -> Entry:
    words = f"{game.settings} --lr_cooldown 0.5 --env {game.name}"
    goal = 0.999 if "CartPole" in game.name else 0.99  # a sampled policy answers a thousandth of the questions at random
    return Entry(game.name, "03_popgym_suite.py", words, judged=min(1024, max(256, 100_000 // game.steps)), goal=goal)


BOARD = Board("popgym", __doc__ or "", [_entry(game) for game in GAMES], table, draw)

if __name__ == "__main__":
    sys.exit(main(BOARD))
