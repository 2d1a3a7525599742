"""The way of TD errors from an update back to the data set that drew its sequences by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from amago.agent import BaseAgent
from amago.data.batch import Batch
from amago.run.checks import SettingsError


def report_td_errors(batch: Batch, agent: BaseAgent) -> None:
    """Tell the data sets that draw by priority the TD errors of their sequences, after the losses of a batch.

    Raises:
        SettingsError: the agent has computed none.
    """
    if batch.sources is None:
        return
    errors, agent.td_errors = agent.td_errors, None
    if errors is None:
        raise SettingsError(
            f"sampling='priority' needs TD errors, but {type(agent).__name__} computes none: its losses set td_errors, (B, L, 1), "
            "where critics are trained; set online_coeff above 0 or fake_filter=False, or sampling to 'uniform'"
        )
    mask = agent.loss_mask(batch)
    kept = torch.where(mask, errors.detach().float(), 0.0)[..., 0]
    mean = kept.sum(1) / mask.sum((1, 2)).clamp(min=1)
    both = torch.stack((kept.amax(1), mean)).cpu().numpy()  # one copy from the device
    both[:, ~mask.any(1)[:, 0].cpu().numpy()] = np.nan  # nothing was trained on
    owners: dict[int, tuple[Any, list[int]]] = {}
    for i, source in enumerate(batch.sources):
        if source is not None:
            owners.setdefault(id(source.owner), (source.owner, []))[1].append(i)
    for owner, rows in owners.values():
        owner.report([batch.sources[i] for i in rows], both[0, rows], both[1, rows])
