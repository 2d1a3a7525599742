"""``amago eval RUN --memory``: is the agent's memory used, and what for?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from amago.cli.gym_env import GymEnv
from amago.cli_utils.errors import running
from amago.policy import Policy
from amago.policy.memory import conclusion, plot_memory, study_memory, table
from amago.run.layout import fitted
from amago.run.rng import draw_seed


def show_memory(
    policy: Policy,
    make_env: GymEnv,
    actors: int,
    episodes: int,
    greedy: bool,
    seed: int | None,
    contexts: list[int] | None,
    picture: Path,
) -> None:
    """Play, print a table and a conclusion, and draw a picture."""
    envs = [make_env() for _ in range(actors)]
    bar: tqdm | None = None  # type: ignore[type-arg]

    def on_view(name: str) -> Callable[[int], None]:
        nonlocal bar
        if bar is not None:
            bar.close()
        bar = tqdm(desc=f"memory: {name:<26}", unit="step", leave=False, dynamic_ncols=True, disable=None)
        return bar.update

    try:
        with running():
            study = study_memory(
                policy.agent, envs, episodes, make_env.horizon(envs[0]), contexts, not greedy, policy.device,
                draw_seed() if seed is None else seed, on_view,
            )  # fmt: skip
    finally:
        if bar is not None:
            bar.close()
        for env in envs:
            env.close()
    print(
        f"\nMemory in {study.name}: {episodes} rollouts on the same tasks for each line; mean and 95% interval\n{table(study)}\n"
    )
    print("\n".join(fitted(line, hang=0) for line in conclusion(study)))
    print(f"picture: {plot_memory(study, picture)}")
