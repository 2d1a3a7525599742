"""Launches of up to a thousand collectors and eight learners, simulated: the tables of docs/scaling.md.

    python -m benchmarks.cluster_sizes            # prints the tables, and draws docs/images/cluster.png
    python -m benchmarks.cluster_sizes --update 0.2 --env_ms 2 --actors 16 --collectors 30 --limits 0.001:0.01

Costs of the library are those of benchmarks/cluster_measured.json. The durations of an update and of an environment's step are assumed:
give yours. With ``--collectors`` only that launch is predicted and simulated.
"""

from __future__ import annotations

import dataclasses
import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

from amago.run.launched.protocol import UpdateLimits
from benchmarks.cluster_model import Cluster, Constants, predict, saturation
from benchmarks.cluster_simulation import Result, simulate

POLICY = 0.0038
"""Seconds of the policy's step for 16 actors: docs/performance.md, a Transformer of width 256 with 3 layers."""
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "cluster.png"
SIMULATED = 300.0


def machine(update: float = 0.05, env: float = 0.01, actors: int = 16, **fields: float | int) -> Cluster:
    """A launch of one core a collector, which steps all of its environments.

    Args:
        update: seconds of one.
        env: seconds of a step of one environment.
    """
    step = actors * env + POLICY * max(1.0, actors / 16)
    base = Cluster(
        collectors=1,
        actors=actors,
        step=step,
        phase=50,
        horizon=50,
        update=update,
        epoch=100,
        step_bytes=100.0,
        weights=2e7,
        jitter=0.2,
    )
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def typical() -> dict[str, list[Cluster]]:
    """Launches of different sizes on three clusters, the last of each with all of its cores."""

    def of(sizes: Iterable[int], **fields: float | int) -> list[Cluster]:
        return [machine(collectors=n, **fields) for n in sizes]

    return {
        "a workstation, 16 cores, one GPU": of((2, 7, 14), least=0.005, most=0.02),
        "4 machines of 64 cores, one GPU": of((16, 64, 252), least=0.0005, most=0.002, nodes=4),
        "Slurm, 16 machines, 1,000 cores, 8 GPUs": of((64, 250, 1000), least=0.0001, most=0.0005, nodes=16, learners=8),
        "the same with pictures, 64x64x3": of((64, 250, 1000), least=0.0001, most=0.0005, nodes=16, learners=8, step_bytes=12_300.0),
    }  # fmt: skip


def line(cluster: Cluster, found: Result) -> str:
    """A row of the table."""
    cells = [
        f"{cluster.collectors:,}", f"{found.steps:,.0f}", f"{found.updates:.1f}", f"{found.final_ratio:.2g}",
        f"{100 * found.learner['waiting']:.0f}%", f"{100 * found.collectors['paused']:.0f}%", f"{found.lag_versions:.1f}",
        f"{found.lag_seconds:.0f} s", f"{found.bytes / 1e6:.3g} MB/s", f"{found.weight_bytes / 1e6:.3g} MB/s", f"{found.spool:,}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| collectors | steps/s | updates/s | updates/step | learner waits | collectors pause | lag, versions | age of the policy "
    "| data | weights | most steps waiting for delivery |"
)


def limits(cluster: Cluster, constants: Constants) -> str:
    """How many collectors each resource serves."""
    found = saturation(cluster, constants)
    return "; ".join(f"{name} {number:,.0f}" if number < 1e7 else f"{name}: no limit" for name, number in found.items())


def tables(constants: Constants) -> Iterator[tuple[str, list[Cluster], list[Result]]]:
    """Each cluster with its launches, simulated; prints them."""
    for name, clusters in typical().items():
        full = clusters[-1]
        print(
            f"\n**{name}**, `--updates-per-step {full.least:g}:{full.most:g}`\n\n{HEAD}\n|"
            + " --- |" * HEAD.count(" | ")
            + " --- |"
        )
        results = []
        for cluster in clusters:
            results.append(simulate(cluster, constants, SIMULATED, since=SIMULATED / 3, sample=1.0))
            print(line(cluster, results[-1]), flush=True)
        print(f"\nCollectors that each resource serves, with {full.collectors:,}: {limits(full, constants)}.")
        yield name, clusters, results


def draw(figures: Iterable[tuple[str, list[Cluster], list[Result]]], constants: Constants) -> None:
    """Plot steps and updates a second against collectors: lines from the closed form, points from the simulation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axes, (name, clusters, results) in zip(figure.subplots(1, 4), figures):
        most = clusters[-1].collectors
        sizes = sorted({max(1, round(most * 1.08**-i)) for i in range(100)})
        predicted = [predict(dataclasses.replace(clusters[-1], collectors=n), constants) for n in sizes]
        axes.loglog(sizes, [p.steps for p in predicted], color="#1f5fa8", label="steps/s, closed form")
        axes.loglog(
            [c.collectors for c in clusters], [r.steps for r in results], "o", color="#1f5fa8", label="steps/s, simulated"
        )
        axes.loglog(sizes, [p.updates for p in predicted], color="#b5541c", label="updates/s, closed form")
        axes.loglog(
            [c.collectors for c in clusters], [r.updates for r in results], "o", color="#b5541c", label="updates/s, simulated"
        )
        axes.set(title=name, xlabel="collectors")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=100)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m benchmarks.cluster_sizes", description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--collectors", type=int, default=None, help="processes that act; default: the tables")
    parser.add_argument("--update", type=float, default=0.05, help="seconds of an update")
    parser.add_argument("--env_ms", type=float, default=10.0, help="milliseconds of a step of one environment")
    parser.add_argument("--actors", type=int, default=16, help="environments of a collector, stepped one after another")
    parser.add_argument("--nodes", type=int, default=0, help="machines beside the learner's; 0: one machine")
    parser.add_argument("--learners", type=int, default=1, help="ranks")
    parser.add_argument("--phase", type=int, default=50, help="steps of each actor between two deliveries")
    parser.add_argument("--limits", type=UpdateLimits.parse, default=UpdateLimits(), help="MIN:MAX updates per step")
    parser.add_argument("--files", type=int, default=0, help="in the learner's store")
    options = parser.parse_args(argv)
    constants = Constants.load_from()
    if options.collectors is None:
        draw(list(tables(constants)), constants)
    else:
        one(options, constants)


def one(options: Namespace, constants: Constants) -> None:
    """Predict and simulate the launch of the arguments."""
    cluster = machine(
        options.update, options.env_ms / 1000, options.actors, collectors=options.collectors, nodes=options.nodes,
        learners=options.learners, phase=options.phase, least=options.limits.least, most=options.limits.most,
    )  # fmt: skip
    expected = predict(cluster, constants, options.files)
    print(
        f"closed form: {expected.steps:,.0f} steps/s, {expected.updates:.1f} updates/s; more {expected.limit} would make it faster"
    )
    found = simulate(cluster, constants, SIMULATED, since=SIMULATED / 3, files=options.files)
    print(f"simulated:\n{HEAD}\n{line(cluster, found)}")
    if cluster.least or not math.isinf(cluster.most):
        print(f"collectors that each resource serves: {limits(cluster, constants)}")


if __name__ == "__main__":
    main()
