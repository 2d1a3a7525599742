"""Statistics of actors: finished rollouts, and the numbers that environments have logged (`AMAGO_ENV_LOG_PREFIX`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]

AMAGO_ENV_LOG_PREFIX = "AMAGO_LOG_METRIC"
"""Numbers in ``info`` under keys with this prefix are averaged and logged by environment name."""


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished rollout.

    Attributes:
        env_name: the environment's name during it.
        ret: the sum of its rewards.
        length: the number of its transitions.
        metrics: mean of each number that the environment logged (`AMAGO_ENV_LOG_PREFIX`) during it, by key without the prefix.
        actor: number of the actor.
        terminated: False if it was only truncated.
    """

    env_name: str
    ret: float
    length: int
    metrics: dict[str, float] = field(default_factory=dict)
    actor: int = 0
    terminated: bool = True


@dataclass
class PhaseStatistics:
    """Statistics of a pool since they were last drained.

    Attributes:
        episodes: finished rollouts, by actor, then in order of time.
        frames: environment steps by environment name, including the steps of unfinished rollouts.
        restarts: how many environments and workers were replaced.
        dropped: how many unfinished rollouts were dropped with them.
        exploration: the numbers that each actor's exploration reports at the end (`ExplorationWrapper.exploration_metrics`), by
            name.
    """

    episodes: list[EpisodeRecord] = field(default_factory=list)
    frames: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    dropped: int = 0
    exploration: dict[str, list[float]] = field(default_factory=dict)

    def add(self, episodes: Iterable[EpisodeRecord], frames: dict[str, int]) -> None:
        """Add finished rollouts, and steps by environment name."""
        self.episodes += episodes
        for name, n in frames.items():
            self.frames[name] = self.frames.get(name, 0) + n

    def merge(self, later: PhaseStatistics) -> None:
        """Add the statistics of a later part of the phase."""
        self.add(later.episodes, later.frames)
        self.episodes.sort(key=lambda e: e.actor)
        self.restarts += later.restarts
        self.dropped += later.dropped
        self.exploration = later.exploration or self.exploration

    def add_exploration(self, metrics: Mapping[str, Iterable[float]]) -> None:
        """Add the numbers of further actors."""
        for name, values in metrics.items():
            self.exploration.setdefault(name, []).extend(map(float, values))

    def episodes_by_actor(self, num_actors: int) -> list[int]:
        """The number of finished rollouts of each actor."""
        counts = Counter(e.actor for e in self.episodes)
        return [counts[actor] for actor in range(num_actors)]

    def by_actor(self, num_actors: int) -> tuple[list[ReturnHistory], list[SpecialMetricHistory]]:
        """Returns, and the environments' own metrics, of each actor's rollouts."""
        episodes: list[list[EpisodeRecord]] = [[] for _ in range(num_actors)]
        for episode in self.episodes:
            episodes[episode.actor].append(episode)
        return [ReturnHistory.of(e) for e in episodes], [SpecialMetricHistory.of(e) for e in episodes]

    def keep_first(self, quotas: Sequence[int]) -> None:
        """Drop the rollouts of each actor after its first ``quotas[actor]``."""
        seen: Counter[int] = Counter()
        kept = []
        for episode in self.episodes:
            seen[episode.actor] += 1
            if seen[episode.actor] <= quotas[episode.actor]:
                kept.append(episode)
        self.episodes = kept


class ReturnHistory:
    """Returns of finished rollouts: ``data`` is {env_name: [return, ...]}. The argument has no effect."""

    def __init__(self, env_name: str | None = None):
        self.data: dict[str, list[float]] = {}

    @classmethod
    def of(cls, episodes: Iterable[EpisodeRecord]) -> ReturnHistory:
        """The returns of these rollouts."""
        history = cls()
        history.add(episodes)
        return history

    def add(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Append the returns of these rollouts."""
        for episode in episodes:
            self.add_score(episode.env_name, episode.ret)

    def add_score(self, env_name: str, score: float) -> None:
        self.data.setdefault(env_name, []).append(float(score))


class SpecialMetricHistory:
    """Numbers that environments logged: ``data`` is {env_name: {metric: [value, ...]}}, ``log_prefix`` what keys may begin with. The
    argument has no effect.
    """

    log_prefix = AMAGO_ENV_LOG_PREFIX

    def __init__(self, env_name: str | None = None):
        self.data: dict[str, dict[str, list[float]]] = {}

    @classmethod
    def of(cls, episodes: Iterable[EpisodeRecord]) -> SpecialMetricHistory:
        """The metrics of these rollouts, one value a rollout."""
        history = cls()
        for episode in episodes:
            for metric, value in episode.metrics.items():
                history.add_score(episode.env_name, metric, value)
        return history

    def add_score(self, env_name: str, key: str, value: object) -> None:
        """Append a number, or each number of an array or list; ``key`` may have the prefix. ValueError if it holds something else."""
        values = self.data.setdefault(env_name, {}).setdefault(metric_name(key) or key, [])
        values += metric_values(key, value)


Sums = dict[str, list[float]]
"""{metric: [sum, number]} of the numbers logged in one rollout in progress."""


def metric_name(key: object) -> str | None:
    """The name under which an entry of ``info`` is logged: its key without the prefix. None if it is not logged."""
    if not isinstance(key, str) or not key.startswith(AMAGO_ENV_LOG_PREFIX):
        return None
    return key[len(AMAGO_ENV_LOG_PREFIX) :].strip(" _-/:") or AMAGO_ENV_LOG_PREFIX


def metric_values(key: str, value: object) -> list[float]:
    """The numbers in an entry of ``info``: one, or the elements of an array. ValueError if it holds something else."""
    if isinstance(value, np.ndarray) and value.dtype == object:  # rows of a vectorised environment, which may differ in length
        return [number for one in value.ravel() if one is not None for number in metric_values(key, one)]
    try:
        return np.asarray(value, dtype=np.float64).ravel().tolist()  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        raise ValueError(
            f"info[{key!r}] is {value!r}, but what an environment logs must be a number or an array of numbers"
        ) from None


def collect_row(info: dict[Any, Any], sums: Sums) -> None:
    """Add the numbers in the ``info`` of one environment."""
    for key, value in info.items():
        if key.__class__ is str and key.startswith(AMAGO_ENV_LOG_PREFIX):
            _add(sums, key, value)


def _add(sums: Sums, key: str, value: Any) -> None:
    name = metric_name(key) or key
    for number in (value,) if value.__class__ is float else metric_values(key, value):
        both = sums.setdefault(name, [0.0, 0.0])
        both[0] += number
        both[1] += 1.0


def collect_rows(info: dict[Any, Any], rows: Mask, sums: list[Sums], masked: bool = False) -> None:
    """Add the numbers in the ``info`` of a vectorised environment to the ``sums`` of some rows, (B,) bool.

    An entry is an array with one value (or one array) a row, valid where the entry ``_key`` (if any) is True, or one number for
    all rows. ``masked``: an array must have its mask, or None in rows without a value: else zeros of rows that log nothing
    would count.

    Raises:
        ValueError: an entry has another number of rows, or has no mask, or a value is no number.
    """
    for key, value in info.items():
        if metric_name(key) is None:
            continue
        mask, values = np.asarray(info.get(f"_{key}", True), dtype=bool), np.asarray(value)
        for name, given in ((f"_{key}", mask), (key, values)):
            if given.ndim and given.shape[0] != len(rows):
                raise ValueError(f"info[{name!r}] has {given.shape[0]} values for {len(rows)} environments")
        mask, values = rows & mask, values if values.ndim else np.broadcast_to(values, rows.shape)
        if masked and np.ndim(value) and values.dtype != object and f"_{key}" not in info:
            raise ValueError(
                f"info[{key!r}] has a value for each of {len(rows)} environments, of which not all have ended, and does not say which "
                f"have logged one: add info['_{key}'], a bool for each (True for all, if every step is to count)"
            )
        for row in np.flatnonzero(mask):
            if values[row] is not None:
                _add(sums[row], key, values[row])
