"""Complete rollouts of an agent, side by side, with the part of the past that a `View` allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago.agent import BaseAgent
from amago.agent.base import evaluating
from amago.envs import AMAGOEnv
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX
from amago.run.process import SharedProcess

Array = NDArray[Any]
_ATTEMPT = re.compile(r"\b(?:Attempt|Trial) (\d+)\b")


@dataclass(frozen=True)
class View:
    """The part of a rollout that the policy sees when it acts.

    Args:
        context: the last so many steps, the current one included; 1: no memory. None: all that the agent remembers.
        this_attempt: the memory is erased at the end of each attempt. Not with ``context``.
    """

    context: int | None = None
    this_attempt: bool = False

    def __post_init__(self) -> None:
        if self.context is not None and (self.context < 1 or self.this_attempt):
            raise ValueError(f"context must be at least 1, and given without this_attempt; got {self!r}")


FULL, THIS_ATTEMPT = View(), View(this_attempt=True)


@dataclass
class Steps:
    """Inputs of the policy in one rollout, a row a step: {key: array}, rl2s."""

    obs: list[dict[str, Array]] = field(default_factory=list)
    rl2s: list[Array] = field(default_factory=list)


@dataclass
class EpisodeResult:
    """One rollout.

    Attributes:
        name: of its environment.
        rewards: of each step.
        attempt_ends: for each finished attempt, the number of steps taken until then.
        metrics: the environment's own, by name; the latest value of each.
        ended: False where the rollout was broken off.
        steps: see `play`.
    """

    name: str
    rewards: list[float] = field(default_factory=list)
    attempt_ends: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    steps: Steps | None = None

    def take(self, reward: float, info: dict[str, Any]) -> None:
        """Add a step."""
        self.rewards.append(reward)
        found = {
            name.removeprefix(AMAGO_ENV_LOG_PREFIX).strip(): float(np.mean(value))
            for name, value in info.items() if isinstance(name, str) and name.startswith(AMAGO_ENV_LOG_PREFIX)
        }  # fmt: skip
        self.metrics |= found
        if any(_ATTEMPT.search(name) for name in found):
            self.attempt_ends.append(len(self.rewards))


class _TruncatedContextPolicy:
    """The policy of several rollouts that began together, acting with one `View`."""

    def __init__(self, agent: BaseAgent, rows: int, view: View, sample: bool, device: torch.device):
        self.agent, self.view, self.sample, self.device = agent, view, sample, device
        self._memory = agent.init_hidden_state(rows, device) if view.context is None else None
        self._embedded: list[Tensor] = []  # (rows, 1, D) of the last steps

    def act(self, obs: dict[str, Array], rl2s: Array, time: int, erased: Array) -> Array:
        """Actions in stored form (rows, S) at a step of all rollouts; ``erased`` (rows,): the last step ended an attempt."""
        tensors, r = {k: self._tensor(v) for k, v in obs.items()}, self._tensor(rl2s)
        n = self.view.context
        if n is None:
            if self.view.this_attempt and erased.any():
                self._memory = self.agent.reset_hidden_state(self._memory, erased)
            times = torch.full((len(r), 1), time, device=self.device)
            actions, self._memory = self.agent.get_actions(tensors, r, times, self._memory, self.sample)
            return actions.cpu().numpy()
        embedded = self.agent.tstep_encoder(obs={k: v.unsqueeze(1) for k, v in tensors.items()}, rl2s=r.unsqueeze(1))
        self._embedded = [*self._embedded, embedded][-n:]
        seq = torch.cat(self._embedded, dim=1)
        times = torch.arange(time + 1 - seq.shape[1], time + 1, device=self.device)[None, :, None].repeat(len(r), 1, 1)
        states, _ = self.agent.traj_encoder(seq=seq, time_idxs=times, hidden_state=None)
        return self.agent.act(states[:, -1], tensors, self.sample).cpu().numpy()

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def play(
    agent: BaseAgent,
    envs: Sequence[AMAGOEnv],
    seeds: Sequence[int],
    max_steps: int,
    view: View = FULL,
    sample: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
    keep_first: bool = False,
    on_step: Callable[[int], object] | None = None,
) -> list[EpisodeResult]:
    """Play one rollout for each seed, so that two views are compared on the same tasks.

    Args:
        agent: on ``device``. It acts in evaluation mode; its mode is restored afterwards.
        envs: of one row each, reset with ``seeds``. As many rollouts as there are environments are played side by side.
        max_steps: rollouts are broken off after so many steps.
        sample: draw actions from the policy; else take its mode.
        seed: of the policy's samples.
        keep_first: keep the policy's inputs in the first rollout (`EpisodeResult.steps`).
        on_step: called after each reset and each step with the number of environment steps taken by it.

    Returns:
        the rollouts, in the order of ``seeds``.

    Raises:
        ValueError: there are no environments, or one has several rows.
    """
    if not envs or any(env.vectorized for env in envs):
        raise ValueError("rollouts are played in environments of one row each; there are none, or one is vectorised")
    process = SharedProcess()
    torch.manual_seed(seed)
    results: list[EpisodeResult] = []
    with evaluating(agent), process.environments(), torch.no_grad():
        for begin in range(0, len(seeds), len(envs)):
            wave = seeds[begin : begin + len(envs)]
            with process.own_work():
                policy = _TruncatedContextPolicy(agent, len(wave), view, sample, torch.device(device))
            results += _wave(policy, process, envs[: len(wave)], wave, max_steps, keep_first and not results, on_step)
    return results


def _wave(
    policy: _TruncatedContextPolicy,
    process: SharedProcess,
    envs: Sequence[AMAGOEnv],
    seeds: Sequence[int],
    max_steps: int,
    keep: bool,
    on_step: Callable[[int], object] | None,
) -> list[EpisodeResult]:
    """Rollouts that begin together; those that have ended wait for the others."""
    timesteps = [env.reset(seed=s)[0] for env, s in zip(envs, seeds)]
    results = [EpisodeResult(env.env_name) for env in envs]
    if keep:
        results[0].steps = Steps()
    if on_step is not None:
        on_step(0)
    for taken in range(max_steps):
        under_way = [i for i, r in enumerate(results) if not r.ended]
        if not under_way:
            break
        obs = {k: np.concatenate([s.obs[k] for s in timesteps]) for k in timesteps[0].obs}
        rl2s = np.concatenate([s.rl2 for s in timesteps])
        erased = np.array([r.attempt_ends[-1:] == [taken] for r in results])
        if (kept := results[0].steps) is not None and not results[0].ended:
            kept.obs.append({k: v[0] for k, v in obs.items()})
            kept.rl2s.append(rl2s[0])
        with process.own_work():
            actions = policy.act(obs, rl2s, taken, erased)
        for i in under_way:
            timesteps[i], reward, terminated, truncated, info = envs[i].step(actions[i : i + 1])
            results[i].take(np.asarray(reward).item(), info)
            results[i].ended = np.asarray(terminated).item() or np.asarray(truncated).item()
        if on_step is not None:
            on_step(len(under_way))
    return results
