"""Learning histories: the trajectories of a run in their order, joined into sequences over episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch

from amago.data.batch import RLData
from amago.data.trajectory import StoredTraj
from amago.loading.offline.base import InMemory, OfflineDataset
from amago.spaces import ActionSpec
from amago.store import TrajectoryStore
from amago.store.store import PARTITIONS


@gin.configurable(module="amago.loading")
class HistoryDataset(OfflineDataset):
    """Sequences over the episodes of a learning history, for cloning: the model sees how returns rose, and goes on with it
    (Algorithm Distillation, Laskin et al. 2022, arXiv 2210.14215). A history holds the trajectories of one environment's name in the order in
    which they were stored; the first observation of an episode takes the place of the last one of the episode before.

    A sequence may begin anywhere in a history, and looks like the start of a rollout: time index 0, no reward or action before. Ends of
    episodes within it are no terminations. Meant for an environment whose rollout spans several attempts, and for cloning
    (``Agent(online_coeff=0, offline_coeff=1, fake_filter=True)``): values are not those of the recorded episodes.

    Args:
        path: directory of a run or of its buffer, which is held in memory.
        every: keep every so many episodes of a history, whose learning is then as much faster.
        label: the name of an integer extra field (rows "T"), the index of the best action of a discrete action space, which is cloned in place of
            the action taken (Decision-Pretrained Transformer, Lee et al. 2023, arXiv 2306.14892). The actions taken remain in the inputs.

    Raises:
        ValueError: (when opened) there are no trajectories, or no such label.
    """

    def __init__(self, path: str | Path, every: int = 1, label: str | None = None):
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
        self.path, self.every, self.label = Path(path).expanduser(), every, label

    @property
    def name(self) -> str:
        return str(self.path)

    def load(self) -> InMemory:
        root = next((p for p in (self.path / "buffer", self.path) if any((p / x).is_dir() for x in PARTITIONS)), self.path)
        store = TrajectoryStore(root, edit=False)
        store.refresh()
        view = store.view()
        histories: dict[str, list[int]] = {}
        if not len(view):
            raise ValueError(f"{self.path} has no trajectories")
        for i in range(len(view)):
            histories.setdefault(view.env_name(i), []).append(i)
        joined = [_join([view.read(i) for i in found[:: self.every]]) for found in histories.values()]
        spec: ActionSpec = view.action_spec(0)
        if self.label is not None and (spec.kind != "discrete" or any(self.label not in t.extras for t in joined)):
            raise ValueError(
                f"{self.path} has no extra field {self.label!r} in all trajectories, or its actions are not discrete"
            )
        return InMemory(joined, view.obs_space(0), spec, view.schema(0).extras)

    def sample_random_trajectory(self, rng: np.random.Generator | None = None) -> RLData:
        data = super().sample_random_trajectory(rng)
        data.time_idxs = data.time_idxs - data.time_idxs[0]
        data.rl2s[0] = 0.0
        if self.label is not None:
            data.actions = torch.nn.functional.one_hot(
                data.extras[self.label].long().reshape(-1), data.actions.shape[-1]
            ).float()
        return data


def _join(trajs: list[StoredTraj]) -> StoredTraj:
    def joined(arrays: list[Any], keep_last: bool = False) -> Any:
        return np.concatenate([a[:-1] if keep_last and i < len(arrays) - 1 else a for i, a in enumerate(arrays)])

    actions = joined([t.actions for t in trajs])
    return StoredTraj(
        {k: joined([t.obs[k] for t in trajs], True) for k in trajs[0].obs}, actions, joined([t.rews for t in trajs]),
        np.zeros((len(actions), 1), bool), env_name=trajs[0].env_name,
        extras={k: joined([t.extras[k] for t in trajs]) for k in trajs[0].extras if all(len(t.extras[k]) == len(t) for t in trajs)},
    )  # fmt: skip
