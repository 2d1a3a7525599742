"""Draw the learning curves of docs/results.md from run directories.

    python docs/plot_results.py RUNS_DIR docs/images

writes learning.png and benchmarks.png. RUNS_DIR holds the runs under the names that docs/results.md gives them.
"""

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from amago.run.plots import read_metrics

RETURN = "Average Total Return (Across All Env Names)"
MEMORY = {"Transformer": "#1f5fa8", "GRU": "#1e8a5a", "Mamba": "#8b5fbf", "no memory": "#c0392b"}
SCALES = {"MultiTaskAgent": "#1f5fa8", "Agent": "#c0392b"}
# title, run name before the seed by agent, their colours, the metric, its axis, what the task asks for
TASKS = [
    ("CartPole-v1", {"no memory": "cartpole"}, MEMORY, RETURN, "return", 475.0),
    ("Pendulum-v1", {"no memory": "pendulum"}, MEMORY, RETURN, "return", -250.0),
    (
        "Passive T-Maze, 100 steps",
        {"Transformer": "tmaze", "GRU": "tmaze_gru", "Mamba": "tmaze_mamba", "no memory": "tmaze_ff"},
        MEMORY, "Success", "success", 1.0,
    ),
    ("Dark key-to-door 5x5, 100 steps", {"Transformer": "door", "no memory": "door_ff"}, MEMORY, RETURN, "return", None),
    (
        "PointRobot, third attempt", {"GRU": "point_gru", "no memory": "point_ff"}, MEMORY, "Average Attempt 2 Final Distance",
        "final distance", 0.356,
    ),
    *(
        (f"ToyMixture: {task}", {"MultiTaskAgent": "mixture_multitask", "Agent": "mixture_agent"}, SCALES, f"Average Score in {task}",
         f"return / best ({best})", None)
        for task, best in (("recall", "1"), ("lake", "90"), ("room", "2,000"))
    ),
]  # fmt: skip
RELABELED = {"relabeling": "#1f5fa8", "none": "#c0392b"}
BENCHMARKS = [
    *(
        (f"POPGym {game}", {"Transformer": f"popgym_{game}"}, MEMORY, RETURN, "return", goal)
        for game, goal in (
            ("RepeatPreviousEasy", 0.95), ("RepeatFirstEasy", 0.95), ("PositionOnlyCartPoleEasy", 0.95), ("CountRecallEasy", None),
            ("AutoencodeEasy", None),
        )
    ),
    ("MemoryChain, 20 steps", {"Transformer": "memory_chain"}, MEMORY, RETURN, "return", 1.0),
    ("MazeRunner 7x7, 2 goals", {"relabeling": "maze_some", "none": "maze_none"}, RELABELED, "Success", "both goals found", None),
    ("BabyAI GoToRedBallGrey, 2 attempts", {"Transformer": "babyai"}, MEMORY, "Success Rate", "success, unseen seeds", 0.9),
    ("Symbolic Alchemy, by colour", {"GRU": "alchemy", "no memory": "alchemy_ff"}, MEMORY, RETURN, "return", 146.0),
    (
        "HalfCheetahVel, 1 to 2 m/s", {"no memory": "half_cheetah_vel"}, MEMORY, "Attempt 0 Velocity Error", "velocity error, m/s",
        None,
    ),
]  # fmt: skip


def curve(run: Path, metric: str) -> list[tuple[int, float, float]]:
    """(environment steps, value, seconds) of each evaluation during training."""
    out = []
    for row in read_metrics(run):
        name = next((k for k in row["values"] if metric in k), None)
        if row["section"] == "val" and name is not None:
            out.append((row["env_steps"], row["values"][name], row["wall_time"]))
    return out


def draw(root: Path, tasks: list[tuple[Any, ...]], rows: int, picture: Path) -> None:
    columns = -(-len(tasks) // rows)
    figure = Figure(figsize=(5 * columns, 3.7 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns).flat)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    for axes, (title, agents, colours, metric, axis, goal) in zip(panels, tasks, strict=False):
        for agent, name in agents.items():
            for i, run in enumerate(sorted(root.glob(f"{name}_seed[0-9]"))):
                points = curve(run, metric)
                axes.plot(
                    [p[0] / 1000 for p in points],
                    [p[1] for p in points],
                    color=colours[agent],
                    alpha=0.85,
                    label=agent if i == 0 else None,
                    marker=".",
                )
        if not axes.lines:
            axes.set_visible(False)  # no such run
            continue
        if goal is not None:
            axes.axhline(goal, color="grey", linestyle="--", linewidth=1, label=f"goal: {goal:g}")
        axes.set_title(title)
        axes.set_xlabel("environment steps, thousands")
        axes.set_ylabel(axis)
        axes.legend()
        axes.grid(alpha=0.3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    runs, pictures = Path(sys.argv[1]), Path(sys.argv[2])
    draw(runs, TASKS, 3, pictures / "learning.png")
    draw(runs, BENCHMARKS, 3, pictures / "benchmarks.png")
