"""One step of a trained policy as a pure function: (observation, memory) -> (action, memory).

The memory (the hidden state of the sequence model, the previous action, the index of the step) is an argument and
a result, so the function has no state. The number of environments is free. The spectral norms of a transformer are computed once
and folded into its weights. The sequence model itself turns its hidden state into named tensors
(`amago.nets.traj_encoders.TrajEncoder.export_hidden_state`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from amago.agent import ActorCriticAgent, BaseAgent
from amago.data.batch import rl2_tensor
from amago.nets.actor_critic import BaseActorHead
from amago.nets.distributions import ProductOutput
from amago.nets.policy_dists import (
    ActionDistribution,
    BetaOutput,
    DiscreteOutput,
    GMMOutput,
    MultibinaryOutput,
    TanhGaussianOutput,
    action_distribution,
)
from amago.nets.transformer import SigmaReparam
from amago.spaces import ActionSpec, describe

PARAMETERS: dict[type[ActionDistribution], tuple[str, ...]] = {
    DiscreteOutput: ("probs",),
    MultibinaryOutput: ("probs",),
    TanhGaussianOutput: ("loc", "scale"),
    BetaOutput: ("alpha", "beta"),
    GMMOutput: ("loc", "scale", "log_weights"),
}
"""The exported parameters of each distribution. Of any other class the output of the network is exported, as "network_output"."""

Tensors = dict[str, Tensor]
_PAST = ("prev_action", "time_idx")  # memory that is not of the sequence model


class StepModel(nn.Module):
    """One step of an `amago.agent.ActorCriticAgent` that takes the mode of its policy.

    Args:
        agent: is copied, to the CPU and into evaluation mode; it is not changed.
        gamma_idx: index of the discount whose policy acts; None: the discount of the agent's rollouts.

    Raises:
        ValueError: the agent's class, its actor's class or its hidden state cannot be exported.
    """

    tstep_encoder: Any
    traj_encoder: Any
    actor: Any

    def __init__(self, agent: BaseAgent, gamma_idx: int | None = None) -> None:
        super().__init__()
        if not isinstance(agent, ActorCriticAgent) or not isinstance(agent.actor, BaseActorHead):
            raise ValueError(f"only an ActorCriticAgent with a BaseActorHead can be exported, got {type(agent).__name__}")
        spec = agent.action_spec
        with torch.no_grad():
            self.tstep_encoder, self.traj_encoder, self.actor = (
                _folded(copy.deepcopy(part).cpu().eval()) for part in (agent.tstep_encoder, agent.traj_encoder, agent.actor)
            )
        self.requires_grad_(False)
        self.action_spec, self.obs_space, self.max_seq_len = spec, agent.obs_space, agent.max_seq_len
        self.straight = agent.pass_obs_keys_to_actor
        self.gamma_idx = range(len(agent.gammas))[agent.rollout_gamma_idx if gamma_idx is None else gamma_idx]
        self.gamma = round(float(agent.gammas[self.gamma_idx]), 6)
        self._check_memory()
        self._leaves = list(_leaves_of(spec))
        for i, (_, leaf, _) in enumerate(self._leaves):
            ends = {gym.spaces.Box: ("low", "high"), gym.spaces.MultiDiscrete: ("start",)}.get(type(leaf.space), ())
            for end in ends:
                kind = np.float64 if end != "start" else np.int64
                self.register_buffer(f"{end}_{i}", torch.from_numpy(getattr(leaf.space, end).reshape(-1).astype(kind)))

    # ---- memory ---------------------------------------------------------------------------------------------------------

    def _check_memory(self) -> None:
        clashes = sorted(set(_PAST) & set(self.traj_encoder.export_hidden_state(self.traj_encoder.init_hidden_state(1, "cpu"))))
        if clashes:
            raise ValueError(
                f"{type(self.traj_encoder).__name__}.export_hidden_state must not use the names {', '.join(clashes)}, which the "
                "step itself uses"
            )

    def init_memory(self, batch_size: int) -> Tensors:
        """The memory of ``batch_size`` environments at the start of a rollout; names and shapes depend on the sequence model."""
        past = {
            "prev_action": torch.zeros(batch_size, self.action_spec.dim),
            "time_idx": torch.zeros(batch_size, dtype=torch.int64),
        }
        hidden = self.traj_encoder.init_hidden_state(batch_size, "cpu")
        return _ordered(past | self.traj_encoder.export_hidden_state(hidden))

    # ---- acting ---------------------------------------------------------------------------------------------------------

    def forward(self, obs: Tensors, reward: Tensor, done: Tensor, memory: Tensors) -> tuple[Tensor | Tensors, Tensors, Tensors]:
        """One step of B environments.

        Args:
            obs: {key: (B, ...)}, with the dtypes of the policy's observation space.
            reward: (B,) float32, of the last action; 0 in the first step.
            done: (B,) bool, True where ``obs`` is the first of a new rollout: memory and reward of that row are cleared.
            memory: returned by the last call; `init_memory`, or zeros of its shapes, in the first.

        Returns:
            three values: the action, (B, ...), as the environment takes it (of a Tuple or Dict space a dict of its leaves, by their
            keys joined with "/"); the parameters of the policy by name, each (B, ...); the next memory.
        """
        fresh = done.unsqueeze(1)
        time_idx = torch.where(done, 0, memory["time_idx"])
        rl2s = torch.where(fresh, 0.0, rl2_tensor(reward.unsqueeze(1), memory["prev_action"]))
        emb = self.tstep_encoder(obs={k: v.unsqueeze(1) for k, v in obs.items()}, rl2s=rl2s.unsqueeze(1))
        tensors = {name: tensor for name, tensor in memory.items() if name not in _PAST}
        hidden = self.traj_encoder.import_hidden_state(tensors, done)
        states, hidden = self.traj_encoder(seq=emb, time_idxs=time_idx[:, None, None], hidden_state=hidden)
        straight = {k: obs[k].unsqueeze(1) for k in self.straight}
        of_each = self.actor.policy_parameters(states, straight_from_obs=straight)  # (B, 1, G, P)
        vec = of_each[:, 0, self.gamma_idx].float()
        policy = action_distribution(self.actor.policy_dist(vec), self.actor.policy_dist)
        stored = policy.sample_action(False)
        past = {"prev_action": self._vector(stored), "time_idx": time_idx + 1}
        memory = _ordered(past | self.traj_encoder.export_hidden_state(hidden))
        return self._to_env(stored), _ordered(_parameters(policy, vec)), memory

    def _vector(self, stored: Tensor) -> Tensor:
        """A stored action (B, S) as networks read it, (B, A)."""
        columns = []
        for part in self.action_spec.parts:
            column = stored[:, part.stored]
            if part.kind == "discrete":
                column = torch.arange(part.dim, device=stored.device) == column
            columns.append(column.float())
        return torch.cat(columns, dim=1)

    def _to_env(self, stored: Tensor) -> Tensor | Tensors:
        """A stored action (B, S) as the environment takes it; for a Tuple or Dict space a dict of its leaves."""
        out = {name: self._leaf_to_env(i, stored[:, at]) for i, (name, _, at) in enumerate(self._leaves)}
        return out[""] if "" in out else _ordered(out)

    def _leaf_to_env(self, i: int, stored: Tensor) -> Tensor:
        spec = self._leaves[i][1]
        space = spec.space
        shape, dtype = space.shape or (), torch.from_numpy(np.zeros(0, space.dtype)).dtype
        if isinstance(space, gym.spaces.Discrete):
            return stored[:, 0].to(torch.int64) + int(space.start)
        if isinstance(space, gym.spaces.MultiDiscrete):
            return (stored.to(torch.int64) + self.get_buffer(f"start_{i}")).to(dtype).reshape(-1, *shape)
        if isinstance(space, gym.spaces.MultiBinary):
            return stored.to(dtype).reshape(-1, *shape)
        low, high = self.get_buffer(f"low_{i}"), self.get_buffer(f"high_{i}")
        scaled = low + (stored.clamp(-1.0, 1.0).double() + 1.0) * 0.5 * (high - low)
        return torch.minimum(torch.maximum(scaled, low), high).to(dtype).reshape(-1, *shape)

    # ---- description ----------------------------------------------------------------------------------------------------

    def example(self, batch_size: int) -> tuple[Tensors, Tensor, Tensor, Tensors]:
        """Arguments of `forward`: zeros, for the first step of a rollout."""
        obs = {k: torch.from_numpy(np.zeros((batch_size, *s.shape), s.dtype)) for k, s in sorted(self.obs_space.spaces.items())}  # type: ignore[misc]
        done = torch.ones(batch_size, dtype=torch.bool)
        return obs, torch.zeros(batch_size), done, self.init_memory(batch_size)

    def batch_axes(self) -> tuple[dict[str, int], int, int, dict[str, int]]:
        """The axis of each argument of `forward` that has size B, in the structure of `example`."""
        two, three = self.init_memory(2), self.init_memory(3)
        axes = {}
        for name, tensor in two.items():
            differ = [i for i, (a, b) in enumerate(zip(tensor.shape, three[name].shape, strict=True)) if a != b]
            if len(differ) != 1:
                raise ValueError(
                    f"the hidden state {name!r} of {type(self.traj_encoder).__name__} has no dimension that counts environments"
                )
            axes[name] = differ[0]
        return dict.fromkeys(sorted(self.obs_space.spaces), 0), 0, 0, axes

    def description(self, parameters: Tensors) -> dict[str, Any]:
        """Spaces, discount and memory of the function as JSON types, for the program that runs it."""
        memory = {
            k: {"shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch.")} for k, v in self.init_memory(1).items()
        }
        return {
            "schema": 1, "observation_space": describe(self.obs_space), "action_space": describe(self.action_spec.space),
            "gamma": self.gamma, "max_seq_len": self.max_seq_len, "parameters": list(parameters), "memory": memory,
            "batch_axes": self.batch_axes()[3],
        }  # fmt: skip


def _leaves_of(spec: ActionSpec, name: str = "", start: int = 0) -> Iterator[tuple[str, ActionSpec, slice]]:
    """(name, spec, stored columns) of each space that is neither Tuple nor Dict. The name is its keys joined with "/", or ""."""
    if not spec.children:
        yield name, spec, slice(start, start + spec.stored_dim)
        return
    for key, child, at in spec.children:
        yield from _leaves_of(child, f"{name}/{key}" if name else str(key), start + at.start)


def _parameters(policy: ActionDistribution, vec: Tensor) -> Tensors:
    """The parameters of a policy by name; of a product of distributions as "NAME.PART"."""
    if isinstance(policy, ProductOutput):
        each = [_parameters(factor, vec) for factor in policy.factors]
        return {f"{name}.{i}": value for i, found in enumerate(each) for name, value in found.items()}
    names = next((names for kind, names in PARAMETERS.items() if isinstance(policy, kind)), ())
    return {name: getattr(policy, name) for name in names} or {"network_output": vec}


def _ordered(tensors: Tensors) -> Tensors:
    """Sorted by name: versions of PyTorch differ in the order in which they flatten a dict that is not."""
    return dict(sorted(tensors.items()))


def _folded(module: nn.Module) -> nn.Module:
    """Replace the `SigmaReparam` layers of ``module`` by linear layers with the same effective weight."""
    for name, child in module.named_children():
        if isinstance(child, SigmaReparam):
            setattr(module, name, _plain(child))
        else:
            _folded(child)
    return module


@torch.no_grad()
def _plain(layer: SigmaReparam) -> nn.Linear:
    weight = layer.effective_weight()
    bias = layer.bias is not None
    plain = skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias, device=weight.device, dtype=weight.dtype)
    plain.requires_grad_(False)
    plain.weight.copy_(weight)
    if layer.bias is not None:
        plain.bias.copy_(layer.bias)
    return plain
