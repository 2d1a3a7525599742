"""What `amago train ENV` reaches with nothing but its defaults, in a budget of processor time of one thread.

    python -m benchmarks.suite.shell run --seeds 3 --jobs 2
    python -m benchmarks.suite.shell table --picture docs/images/amago_train.png

A run is the command itself with `--env_mode sync` (all environments in its process, so that their time counts) and frequent evaluations.
It ends when its budget is spent, or by itself after its epochs. Results are files as those of the suite, in `results/train/ENV/`.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amago.cli.train import add_arguments, make_experiment
from benchmarks.suite.recorded import BudgetSpent, Point, Recorder, append, in_processes, is_done, points
from benchmarks.suite.statistics import final_score, interpolated, interval, time_to_threshold

RESULTS = Path(__file__).parents[2] / "results" / "train"


@dataclass(frozen=True)
class Goal:
    """An environment of Gymnasium, the mean return that counts as learned, and the budget in processor seconds."""

    env: str
    threshold: float
    budget: float = 300.0


GOALS = (
    Goal("CartPole-v1", 475.0),
    Goal("Acrobot-v1", -100.0),
    Goal("FrozenLake-v1", 0.7),
    Goal("Pendulum-v1", -250.0),
    Goal("MountainCarContinuous-v0", 80.0, 900.0),
)


def train(goal: Goal, seed: int, path: Path, budget: float | None = None) -> None:
    """Run `amago train` on an environment and write a row for each evaluation; begins anew if an earlier run was interrupted."""
    parser = ArgumentParser()
    add_arguments(parser)
    with tempfile.TemporaryDirectory(prefix="amago_train_") as folder:
        words = [goal.env, "--run_name", "run", "--buffer_dir", folder, "--seed", str(seed), "--env_mode", "sync"]
        args = parser.parse_args([*words, "--val_interval", "4", "--val_episodes", "24"])
        args.trial = 0
        head = {"task": goal.env, "seed": seed, "command": "amago train"}
        path.unlink(missing_ok=True)
        run = make_experiment(args)
        run.callbacks = [*run.callbacks, Recorder(path, head, goal.budget if budget is None else budget)]
        try:
            run.start()
            run.learn()
        except BudgetSpent:
            pass
        finally:
            run.close()
        append(path, {"done": True})


def read(results: Path, goal: Goal) -> list[list[Point]]:
    """The curves of an environment's finished runs, one for each seed."""
    found = (points(p) for p in sorted((results / goal.env).glob("seed*.jsonl")) if is_done(p))
    return [curve for curve in found if curve]


def table(results: Path) -> str:
    """One row for each environment: processor seconds to the threshold by seed, and the final score with its interval."""
    lines = ["| environment | goal | CPU s until reached, by seed | final score, by seed | mean (95%) |", "| --- " * 5 + "|"]
    for goal in GOALS:
        curves = read(results, goal)
        if not curves:
            continue
        times = [time_to_threshold(c, goal.threshold) for c in curves]
        finals = [final_score(c) for c in curves]
        low, high = interval(finals)
        shown = ", ".join(f"{t:.0f}" if t < float("inf") else f"not in {c[-1].cpu:.0f}" for t, c in zip(times, curves))
        scores = ", ".join(f"{x:.2f}" for x in finals)
        lines.append(
            f"| {goal.env} | {goal.threshold:g} | {shown} | {scores} | {np.mean(finals):.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


def draw(results: Path, path: Path) -> None:
    """A panel for each environment with a thin line for each seed and the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [(goal, curves) for goal in GOALS if (curves := read(results, goal))]
    figure, axes = plt.subplots(1, len(shown), figsize=(3.2 * len(shown), 2.7), squeeze=False)
    for (goal, curves), panel in zip(shown, axes[0]):
        x = np.linspace(0.0, min(goal.budget, max(c[-1].cpu for c in curves)), 120)
        y = np.stack([interpolated(c, x) for c in curves])
        panel.plot(x, y.T, color="tab:blue", alpha=0.35, linewidth=0.9)
        panel.plot(x, y.mean(0), color="tab:blue", linewidth=2.0)
        panel.axhline(goal.threshold, color="grey", linewidth=0.8, linestyle=":")
        panel.set_title(f"{goal.env} ({len(curves)} seeds)", fontsize=9)
        panel.tick_params(labelsize=8)
    axes[0, 0].set_ylabel("mean return", fontsize=9)
    figure.supxlabel("processor seconds of one thread", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.suite.shell", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", choices=("run", "one", "table"), help="train, a single run in this process, or print results"
    )
    names = [g.env for g in GOALS]
    parser.add_argument("--envs", nargs="+", choices=names, default=names, metavar="ENV", help=", ".join(names))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: results/train)")
    parser.add_argument("--seeds", type=int, default=3, help="run: seeds 0 to N - 1; one: the seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument(
        "--budget", type=float, default=None, help="processor seconds of each run, instead of the environments'"
    )
    parser.add_argument("--picture", type=Path, default=None, metavar="FILE.png", help="table: draw the curves")
    args = parser.parse_args(argv)
    goals = [g for g in GOALS if g.env in args.envs]
    if args.command == "table":
        print(table(args.results))
        if args.picture is not None:
            draw(args.results, args.picture)
        return 0
    if args.command == "one":
        import torch

        torch.set_num_threads(1)
        for goal in goals:
            train(goal, args.seeds, args.results / goal.env / f"seed{args.seeds}.jsonl", args.budget)
        return 0
    jobs = [(g.env, s) for s in range(args.seeds) for g in goals if not is_done(args.results / g.env / f"seed{s}.jsonl")]
    return 0 if in_processes(jobs, lambda job: _words(*job, args), args.jobs) else 1


def _words(env: str, seed: int, args: Namespace) -> list[str]:
    words = ["benchmarks.suite.shell", "one", "--envs", env, "--seeds", str(seed), "--results", str(args.results)]
    return words + (["--budget", str(args.budget)] if args.budget is not None else [])


if __name__ == "__main__":
    sys.exit(main())
