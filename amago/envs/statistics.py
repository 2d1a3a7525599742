"""Statistics of actors: finished rollouts, and the numbers that environments have logged (`AMAGO_ENV_LOG_PREFIX`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX


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
        frames: environment steps by environment name, including those of unfinished rollouts.
        restarts: how many environments and workers were replaced.
        dropped: how many unfinished rollouts were dropped with them.
        exploration: the numbers that each actor's exploration reports at the end (`ExplorationWrapper.exploration_metrics`), by name.
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
        self.episodes.sort(key=lambda e: e.actor)  # stable: in order of time for each actor
        self.restarts += later.restarts
        self.dropped += later.dropped
        self.exploration = later.exploration

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
    """Returns of finished rollouts by environment name.

    Args:
        env_name: a name that is known beforehand, with which nothing is done: names come with the returns.

    Attributes:
        data: {env_name: [return, ...]}.
    """

    def __init__(self, env_name: str | None = None):
        self.data: dict[str, list[float]] = {}

    @classmethod
    def of(cls, episodes: Iterable[EpisodeRecord]) -> ReturnHistory:
        """The returns of these rollouts."""
        history = cls()
        for episode in episodes:
            history.add_score(episode.env_name, episode.ret)
        return history

    def add_score(self, env_name: str, score: float) -> None:
        self.data.setdefault(env_name, []).append(float(score))


class SpecialMetricHistory:
    """Numbers that environments logged, by environment name.

    Args:
        env_name: as in `ReturnHistory`.

    Attributes:
        data: {env_name: {metric: [value, ...]}}.
        log_prefix: `AMAGO_ENV_LOG_PREFIX`, which keys may begin with.
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

    def add_score(self, env_name: str, key: str, value: Any) -> None:
        """Append a number, or each number of an array.

        Args:
            env_name: the environment's name.
            key: of the metric, with or without the prefix.
            value: a number, or an array or list of numbers.

        Raises:
            ValueError: it holds something else.
        """
        values = self.data.setdefault(env_name, {}).setdefault(metric_name(key) or key, [])
        values += metric_values(key, value)


class MetricSums:
    """Sums of the numbers logged in one rollout in progress."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, key: str, value: float) -> None:
        both = self._sums.setdefault(key, [0.0, 0.0])
        both[0] += value
        both[1] += 1.0

    def means(self) -> dict[str, float]:
        return {key: total / n for key, (total, n) in self._sums.items()}


def metric_name(key: Any) -> str | None:
    """The name under which an entry of ``info`` is logged: its key without the prefix. None if it is not logged."""
    if not isinstance(key, str) or not key.startswith(AMAGO_ENV_LOG_PREFIX):
        return None
    return key[len(AMAGO_ENV_LOG_PREFIX) :].strip(" _-/:") or AMAGO_ENV_LOG_PREFIX


def metric_values(key: str, value: Any) -> list[float]:
    """The numbers in an entry of ``info``: one, or those of an array.

    Raises:
        ValueError: it holds something else.
    """
    if value.__class__ is float:
        return [value]
    if isinstance(value, np.ndarray) and value.dtype == object:  # rows of a vectorised environment, which may differ in length
        return [number for one in value.ravel() if one is not None for number in metric_values(key, one)]
    try:
        return np.asarray(value, dtype=np.float64).ravel().tolist()  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        raise ValueError(
            f"info[{key!r}] is {value!r}, but what an environment logs must be a number or an array of numbers"
        ) from None


def collect_row(info: dict[Any, Any], sums: MetricSums) -> None:
    """Add the numbers in the ``info`` of one environment."""
    for key, value in info.items():
        if key.__class__ is str and key.startswith(AMAGO_ENV_LOG_PREFIX):
            name = metric_name(key) or key
            for number in metric_values(key, value):
                sums.add(name, number)


def collect_rows(info: dict[Any, Any], rows: Any, sums: list[MetricSums]) -> None:
    """Add the numbers in the ``info`` of a vectorised environment.

    An entry is an array with one value (or one array) a row, valid where the entry ``_key`` (if any) is True, or one number for all
    rows.

    Args:
        info: of the step or reset.
        rows: (B,) bool, the rows to add.
        sums: one a row.

    Raises:
        ValueError: an entry has another number of rows, or a value is not a single number.
    """
    for key, value in info.items():
        name = metric_name(key)
        if name is None:
            continue
        mask = rows & np.asarray(info[f"_{key}"], dtype=bool) if f"_{key}" in info else rows
        values = np.asarray(value)
        if values.ndim == 0:
            values = np.broadcast_to(values, mask.shape)
        if values.shape[0] != mask.shape[0]:
            raise ValueError(f"info[{key!r}] has {values.shape[0]} values for {mask.shape[0]} environments")
        for row in np.flatnonzero(mask):
            if values[row] is not None:
                for number in metric_values(key, values[row]):
                    sums[row].add(name, number)
