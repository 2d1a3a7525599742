"""A trained policy as one pure function, for programs without amago: a step (observation, memory) -> (action, memory).

What is notable: everything that the policy remembers is an argument and a result (the sequence model's state, the previous action,
the index of the step), so the function has no state of its own; the number of environments is free; the spectral norms of a
transformer are divided out of its weights beforehand. The ring of keys and values is the one of `amago.nets.kv_cache`, read and
written through tensors alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from amago.agent import ActorCriticAgent, BaseAgent
from amago.data.batch import rl2_tensor
from amago.nets.actor_critic import BaseActorHead
from amago.nets.distributions import PolicyOutput
from amago.nets.kv_cache import CacheSlots, KVCache
from amago.nets.mamba import MambaState
from amago.nets.policy_dists import BetaOutput, DiscreteOutput, GMMOutput, MultibinaryOutput, TanhGaussianOutput
from amago.nets.product import ProductOutput
from amago.nets.transformer import SigmaReparam
from amago.spaces import ActionSpec, describe

PARAMETERS: dict[type[PolicyOutput], tuple[str, ...]] = {
    DiscreteOutput: ("probs",),
    MultibinaryOutput: ("probs",),
    TanhGaussianOutput: ("loc", "scale"),
    BetaOutput: ("alpha", "beta"),
    GMMOutput: ("loc", "scale", "log_weights"),
}
"""What is exported of each distribution. Of any other, the network's output that describes it, as "network_output"."""

Tensors = dict[str, Tensor]


class TensorCache:
    """`amago.nets.kv_cache.KVCache` as a function of tensors: nothing is written in place or read on the host.

    Args:
        keys, values: (N, B, H, S, D).
        lengths: (B,) tokens of each row so far.
        sinks: K.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, sinks: int) -> None:
        self.keys, self.values, self.lengths, self.sinks = list(keys.unbind(0)), list(values.unbind(0)), lengths, sinks

    def advance(self) -> CacheSlots:
        """Make room for one more token in every row."""
        self.lengths = self.lengths + 1
        slots = self.keys[0].shape[2]
        return CacheSlots(self.lengths, slots, slots, full=False, newest=None, sinks=self.sinks)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: CacheSlots) -> tuple[Tensor, Tensor]:
        """Put k and v (B, H, 1, D) in their slots; all of the layer, (B, H, S, D) each."""
        here = (torch.arange(slots.capacity, device=k.device) == slots.newest_per_row.unsqueeze(1))[:, None, :, None]
        for buffers, new in ((self.keys, k), (self.values, v)):
            buffers[layer] = torch.where(here, new.to(buffers[layer].dtype), buffers[layer])
        return self.keys[layer], self.values[layer]


class StepModel(nn.Module):
    """One step of an `ActorCriticAgent` that acts by the mode of its policy.

    Args:
        agent: is not changed; a copy of what acts is kept, on the CPU in evaluation mode.
        gamma_idx: which of its discounts acts; None: the one of its rollouts.

    Raises:
        ValueError: an agent, action space or memory that cannot be written as such a function.
    """

    # copies of the agent's parts, of whatever classes those are
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
        memory = self.traj_encoder.init_hidden_state(1, "cpu")
        self._pack(memory)  # refuses what cannot be exported
        self._sinks = memory.sinks if isinstance(memory, KVCache) else 0
        self._leaves = list(_leaves_of(spec))
        for i, (_, leaf, _) in enumerate(self._leaves):
            ends = {gym.spaces.Box: ("low", "high"), gym.spaces.MultiDiscrete: ("start",)}.get(type(leaf.space), ())
            for end in ends:
                kind = np.float64 if end != "start" else np.int64
                self.register_buffer(f"{end}_{i}", torch.from_numpy(getattr(leaf.space, end).reshape(-1).astype(kind)))

    # ---- memory ---------------------------------------------------------------------------------------------------------

    def init_memory(self, batch_size: int) -> Tensors:
        """The memory of environments that have seen nothing; names and shapes depend on the model."""
        past = {
            "prev_action": torch.zeros(batch_size, self.action_spec.dim),
            "time_idx": torch.zeros(batch_size, dtype=torch.int64),
        }
        return _ordered(past | self._pack(self.traj_encoder.init_hidden_state(batch_size, "cpu")))

    def _pack(self, state: Any) -> Tensors:
        """What the sequence model remembers as named tensors."""
        if state is None:
            return {}
        if isinstance(state, Tensor):
            return {"hidden": state}
        if isinstance(state, MambaState):
            return {"conv": state.conv, "ssm": state.ssm}
        if isinstance(state, KVCache):
            return {"keys": state.keys, "values": state.values, "lengths": state.lengths}
        if isinstance(state, TensorCache):
            return {"keys": torch.stack(state.keys), "values": torch.stack(state.values), "lengths": state.lengths}
        raise ValueError(
            f"{type(self.traj_encoder).__name__} remembers a {type(state).__name__}: only None, a tensor, a KVCache and a MambaState "
            "can be exported"
        )

    def _unpack(self, memory: Tensors, done: Tensor) -> Any:
        """The inverse of `_pack`, new where ``done``; arguments are left as they are."""
        if "keys" in memory:
            lengths = torch.where(done, 0, memory["lengths"])
            return TensorCache(memory["keys"], memory["values"], lengths, self._sinks)
        if "hidden" in memory:
            return self.traj_encoder.reset_hidden_state(memory["hidden"].clone(), done)
        if "ssm" in memory:
            return self.traj_encoder.reset_hidden_state(MambaState(memory["conv"].clone(), memory["ssm"].clone()), done)
        return None

    # ---- acting ---------------------------------------------------------------------------------------------------------

    def forward(self, obs: Tensors, reward: Tensor, done: Tensor, memory: Tensors) -> tuple[Tensor | Tensors, Tensors, Tensors]:
        """One step of B environments.

        Args:
            obs: {key: (B, ...)}, of the dtypes of the policy's observation space.
            reward: (B,) float32, what the last action earned; 0 in a first step.
            done: (B,) bool, True where ``obs`` is the first of a new rollout: memory and reward begin anew there.
            memory: what the last call gave; at first `init_memory`, or zeros of its shapes.

        Returns:
            the mode of the policy as the environment takes it, (B, ...), of a Tuple or Dict each leaf by its keys joined with "/"; what
            describes the policy that it is the mode of, by name, each (B, ...); the next memory.
        """
        fresh = done.unsqueeze(1)
        time_idx = torch.where(done, 0, memory["time_idx"])
        rl2s = torch.where(fresh, 0.0, rl2_tensor(reward.unsqueeze(1), memory["prev_action"]))
        emb = self.tstep_encoder(obs={k: v.unsqueeze(1) for k, v in obs.items()}, rl2s=rl2s.unsqueeze(1))
        state, hidden = self._advance(emb, time_idx, self._unpack(memory, done))
        straight = {k: obs[k] for k in self.straight}
        of_each = self.actor.policy_parameters(state, straight_from_obs=straight)  # (B, G, P)
        vec = of_each[:, self.gamma_idx].float()
        policy = self.actor.policy_dist.make(vec)
        stored = policy.sample_action(False)
        memory = {"prev_action": self._vector(stored), "time_idx": time_idx + 1} | self._pack(hidden)
        return self._to_env(stored), _ordered(_parameters(policy, vec)), _ordered(memory)

    def _advance(self, emb: Tensor, time_idx: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        """(B, 1, D) -> (B, E), and the next state of the sequence model."""
        if isinstance(hidden, TensorCache):
            return self.traj_encoder.tformer(emb, time_idx.unsqueeze(1), hidden)[:, 0], hidden
        out, hidden = self.traj_encoder(seq=emb, time_idxs=time_idx[:, None, None], hidden_state=hidden)
        return out[:, 0], hidden

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
        """A stored action (B, S) as the environment takes it; a Tuple or Dict by the names of its leaves."""
        out = {name: self._leaf_to_env(i, stored[:, at]) for i, (name, _, at) in enumerate(self._leaves)}
        return out[""] if "" in out else _ordered(out)

    def _leaf_to_env(self, i: int, stored: Tensor) -> Tensor:
        spec = self._leaves[i][1]
        space: Any = spec.space
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
        """Arguments of `forward`: zeros, everything new."""
        obs = {k: torch.from_numpy(np.zeros((batch_size, *s.shape), s.dtype)) for k, s in sorted(self.obs_space.spaces.items())}  # type: ignore[misc]
        done = torch.ones(batch_size, dtype=torch.bool)
        return obs, torch.zeros(batch_size), done, self.init_memory(batch_size)

    def batch_axes(self) -> tuple[dict[str, int], int, int, dict[str, int]]:
        """Which axis of each argument of `forward` counts environments, in the structure of `example`."""
        two, three = self.init_memory(2), self.init_memory(3)
        axes = {}
        for name, tensor in two.items():
            differ = [i for i, (a, b) in enumerate(zip(tensor.shape, three[name].shape, strict=True)) if a != b]
            if len(differ) != 1:
                raise ValueError(
                    f"the memory {name!r} of {type(self.traj_encoder).__name__} has no axis that counts environments"
                )
            axes[name] = differ[0]
        return dict.fromkeys(sorted(self.obs_space.spaces), 0), 0, 0, axes

    def description(self, parameters: Tensors) -> dict[str, Any]:
        """What a program that runs the function should know, as JSON types."""
        memory = {
            k: {"shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch.")} for k, v in self.init_memory(1).items()
        }
        return {
            "schema": 1, "observation_space": describe(self.obs_space), "action_space": describe(self.action_spec.space),
            "gamma": self.gamma, "max_seq_len": self.max_seq_len, "parameters": list(parameters), "memory": memory,
            "batch_axes": self.batch_axes()[3],
        }  # fmt: skip


def _leaves_of(spec: ActionSpec, name: str = "", start: int = 0) -> Iterator[tuple[str, ActionSpec, slice]]:
    """(name, spec, stored columns) of each space that is neither Tuple nor Dict: "" if there is but one, else keys joined with "/"."""
    children: tuple[tuple[Any, ActionSpec, slice], ...] | None = getattr(spec, "children", None)
    if children is None:
        yield name, spec, slice(start, start + spec.stored_dim)
        return
    for key, child, at in children:
        yield from _leaves_of(child, f"{name}/{key}" if name else str(key), start + at.start)


def _parameters(policy: PolicyOutput, vec: Tensor) -> Tensors:
    """What describes a policy, by name; of several independent parts, the number of the part after a dot."""
    if isinstance(policy, ProductOutput):
        each = [_parameters(factor, vec) for factor in policy.factors]
        return {f"{name}.{i}": value for i, found in enumerate(each) for name, value in found.items()}
    names = next((names for kind, names in PARAMETERS.items() if isinstance(policy, kind)), ())
    return {name: getattr(policy, name) for name in names} or {"network_output": vec}


def _ordered(tensors: Tensors) -> Tensors:
    """By name, as every version of PyTorch flattens them then."""
    return dict(sorted(tensors.items()))


def _folded(module: nn.Module) -> nn.Module:
    """``module`` with its `SigmaReparam` layers replaced by plain ones of the same effective weight."""
    for name, child in module.named_children():
        if isinstance(child, SigmaReparam):
            setattr(module, name, _FoldedLinear(child))
        else:
            _folded(child)
    return module


class _FoldedLinear(nn.Module):
    """What callers of a `SigmaReparam` layer use of it, with a weight that is known."""

    def __init__(self, layer: SigmaReparam) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.effective_weight().detach().clone(), requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)

    def effective_weight(self) -> Tensor:
        return self.weight

    @property
    def weight_sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)
