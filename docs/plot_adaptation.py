"""Draw the README's first picture from the rows of two seeds in `benchmarks/results/meta/`: ``python docs/plot_adaptation.py``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from amago.run.plots import plot_adaptation

ROOT = Path(__file__).resolve().parent.parent
AGENTS = {"with memory (GRU)": "lake5", "without memory": "lake5 without memory"}
ATTEMPTS = 10


def curve_and_rates(name: str) -> tuple[list[tuple[int, float]], list[float]]:
    """[(environment steps, return), ...] and the success rate of each attempt, of the greedy policy in 256 new lakes; means over seeds."""
    seeds = [
        [json.loads(line) for line in p.read_text().splitlines()]
        for p in sorted((ROOT / "benchmarks/results/meta" / name).glob("*"))
    ]
    curves = [[(row["steps"], row["score"]) for row in rows if "score" in row] for rows in seeds]
    shortest = min(map(len, curves))
    curve = [(points[0][0], float(np.mean([score for _, score in points]))) for points in zip(*(c[:shortest] for c in curves))]
    tests = [next(row["greedy metrics"] for row in rows if "greedy metrics" in row) for rows in seeds]
    rates = [[next(v for k, v in test.items() if f"Attempt {i} Success" in k) for i in range(ATTEMPTS)] for test in tests]
    return curve, np.mean(rates, axis=0).tolist()


def draw(path: Path) -> Path:
    """Write the picture."""
    found = {agent: curve_and_rates(name) for agent, name in AGENTS.items()}
    title = f"{ATTEMPTS} attempts at a frozen lake never seen before, whose holes are invisible"
    return plot_adaptation({k: c for k, (c, _) in found.items()}, {k: r for k, (_, r) in found.items()}, path, title)


if __name__ == "__main__":
    print(draw(ROOT / "docs" / "images" / "adaptation.png"))
