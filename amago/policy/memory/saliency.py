"""How much each earlier step of a rollout bears on the actions: a saliency map over the policy's past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago.agent import BaseAgent
from amago.nets.policy_dists import Discrete
from amago.policy.playing import Steps

Array = NDArray[Any]
MOST_QUERIES = 64


@dataclass(frozen=True)
class Influence:
    """The influence of earlier steps on the actions of one rollout.

    Attributes:
        queries: (Q,) the steps whose actions are explained: all, or `MOST_QUERIES` of them, evenly spaced.
        share: (Q, T) the norm of the gradient of the log-probability of an action drawn at step ``queries[i]`` with respect to the
            embedding of each step, divided by the row's sum; 0 where nothing has an influence.
        attempts: (T,) the number of the attempt that each step belongs to, from 0.
    """

    queries: NDArray[np.int64]
    share: NDArray[np.float64]
    attempts: NDArray[np.int64]

    def by_distance(self) -> tuple[float, float, float]:
        """The mean share of the current step, of earlier steps in the same attempt, and of earlier attempts."""
        step = np.arange(self.share.shape[1])
        now = step == self.queries[:, None]
        same = self.attempts[None] == self.attempts[self.queries][:, None]
        parts = now, same & ~now, ~same
        kept = self.share.sum(axis=1) > 0
        if not kept.any():
            return 0.0, 0.0, 0.0
        current, attempt, earlier = (float((self.share * part)[kept].sum(axis=1).mean()) for part in parts)
        return current, attempt, earlier


def influence(
    agent: BaseAgent, steps: Steps, attempt_ends: list[int], device: torch.device | str, seed: int = 0
) -> Influence | None:
    """The influence of each step of a rollout on later actions; None for an agent that does not give log-probabilities of its actions.

    A gradient says how much an action would change with a step, not whether the change is of use.

    Args:
        agent: on ``device``.
        steps: what the policy saw. A rollout longer than the agent's context is cut to its last ``max_seq_len`` steps.
        attempt_ends: steps taken when each attempt ended.
        seed: of the actions that are explained, which are drawn from the policy anew.
    """
    if "log_prob" not in agent.policy_extras:
        return None
    length = min(len(steps.rl2s), agent.max_seq_len)
    first = len(steps.rl2s) - length
    attempts = np.searchsorted(np.array(attempt_ends), np.arange(first, first + length), side="right")

    def tensor(rows: list[Array]) -> Tensor:
        return torch.from_numpy(np.stack(rows[first:])).to(device)

    obs = {k: tensor([o[k] for o in steps.obs]) for k in steps.obs[0]}
    was_training = agent.training
    torch.manual_seed(seed)
    queries = np.unique(np.linspace(0, length - 1, min(length, MOST_QUERIES)).round().astype(np.int64))
    try:
        # cuDNN computes no gradients of recurrent networks in evaluation mode
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False), _gradient_through_clips(agent):
            agent.eval()
            with torch.no_grad():
                embedded = agent.tstep_encoder(obs={k: v[None] for k, v in obs.items()}, rl2s=tensor(steps.rl2s)[None])
            embedded = embedded.detach().requires_grad_()
            states, _ = agent.traj_encoder(seq=embedded, time_idxs=tensor(steps.time_idxs)[None], hidden_state=None)
            _, extras = agent.act_with_extras(states[0], obs, True, ("log_prob",))
            log_prob = extras["log_prob"].reshape(length)
            rows = []
            for q in queries.tolist():
                (gradient,) = torch.autograd.grad(log_prob[q], embedded, retain_graph=True)
                rows.append(gradient[0].double().norm(dim=-1).cpu().numpy())
    finally:
        agent.train(was_training)
    norms = np.stack(rows)
    total = norms.sum(axis=1, keepdims=True)
    return Influence(queries, np.divide(norms, total, out=np.zeros_like(norms), where=total > 0), attempts)


@contextmanager
def _gradient_through_clips(agent: BaseAgent) -> Iterator[None]:
    """Let gradients pass the clip of probabilities, at which those of a policy that is sure of its actions end."""
    clips = [m for m in agent.modules() if isinstance(m, Discrete)]
    before = [clip.clip_gradient for clip in clips]
    try:
        for clip in clips:
            clip.clip_gradient = True
        yield
    finally:
        for clip, value in zip(clips, before):
            clip.clip_gradient = value
