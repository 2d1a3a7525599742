"""`amago.envs.builtin.metaworld_envs` in the form that scripts for the original system import."""

from __future__ import annotations

from amago.envs.builtin.metaworld_envs import LONGEST, MetaWorld, metaworld_tasks

__all__ = ["Metaworld"]


class Metaworld(MetaWorld):
    """`amago.envs.builtin.metaworld_envs.MetaWorld` with the tasks of a benchmark.

    Args:
        benchmark_name: as of `amago.envs.builtin.metaworld_envs.metaworld_tasks`, such as "ML10" or "reach-v3".
        split: "train" or "test".
        k_episodes: attempts of a rollout.
        episode_length: steps of an attempt.
        seed: of the goals.
    """

    def __init__(
        self,
        benchmark_name: str,
        split: str = "train",
        k_episodes: int = 1,
        episode_length: int = LONGEST,
        seed: int | None = 0,
    ) -> None:
        name = benchmark_name.upper() if benchmark_name.lower().startswith("ml") else benchmark_name
        super().__init__(metaworld_tasks(name, seed), split, k_episodes, episode_length)
