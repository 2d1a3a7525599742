"""Write one step of a trained policy, (observation, memory) -> (action, memory), as ONNX or for ``torch.export``.

The memory (the hidden state of the sequence model, the previous action, the index of the step) is an argument and a result, so the step
has no state. The spectral norms of a transformer are computed once and folded into its weights.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amago.agent import ActorCriticAgent, BaseAgent
from amago.agent.base import evaluating
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
from amago.nets.utils import Linear
from amago.registry import require
from amago.run.checkpoint import atomic_write
from amago.spaces import ActionSpec, describe

FORMATS = {".onnx": "ONNX, for onnxruntime", ".pt2": "torch.export, for PyTorch"}
METADATA = "amago"
"""Name of the description (JSON) in the file: an entry of ``metadata_props`` in ONNX, an extra file in ``.pt2``."""
PARAMETERS: dict[type[ActionDistribution], tuple[str, ...]] = {
    DiscreteOutput: ("probs",),
    MultibinaryOutput: ("probs",),
    TanhGaussianOutput: ("loc", "scale"),
    BetaOutput: ("alpha", "beta"),
    GMMOutput: ("loc", "scale", "log_weights"),
}
"""The exported parameters of each distribution. Of any other class the output of the network is exported, as "network_output"."""

Tensors = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)


class StepModel(nn.Module):
    """One step of an `amago.agent.ActorCriticAgent` that takes the mode of its policy, of the discount of its rollouts.

    The agent is copied, to the CPU and into evaluation mode. A ValueError names the class that cannot be exported.
    """

    def __init__(self, agent: BaseAgent) -> None:
        super().__init__()
        if not isinstance(agent, ActorCriticAgent) or not isinstance(agent.actor, BaseActorHead):
            raise ValueError(f"only an ActorCriticAgent with a BaseActorHead can be exported, got {type(agent).__name__}")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # of weights that are replaced at once
            self.tstep_encoder = _folded(copy.deepcopy(agent.tstep_encoder).cpu().eval())
            self.traj_encoder = _folded(copy.deepcopy(agent.traj_encoder).cpu().eval())
            self.actor = _folded(copy.deepcopy(agent.actor).cpu().eval())
        self.requires_grad_(False)
        self.action_spec, self.obs_space, self.max_seq_len = agent.action_spec, agent.obs_space, agent.max_seq_len
        self.straight = agent.pass_obs_keys_to_actor
        self.gamma_idx = range(len(agent.gammas))[agent.rollout_gamma_idx]
        self.gamma = round(float(agent.gammas[self.gamma_idx]), 6)
        self._leaves = list(_leaves_of(agent.action_spec))
        for i, (_, leaf, _) in enumerate(self._leaves):
            self.register_buffer(f"leaf_{i}", torch.from_numpy(_affine(leaf)))

    def init_memory(self, batch_size: int) -> Tensors:
        """The memory of ``batch_size`` environments at the start of a rollout; names and shapes depend on the sequence model."""
        past = {
            "prev_action": torch.zeros(batch_size, self.action_spec.dim),
            "time_idx": torch.zeros(batch_size, dtype=torch.int64),
        }
        hidden = self.traj_encoder.export_hidden_state(self.traj_encoder.init_hidden_state(batch_size, "cpu"))
        if clashes := past.keys() & hidden.keys():
            raise ValueError(
                f"{type(self.traj_encoder).__name__}.export_hidden_state must not use the names {', '.join(sorted(clashes))}, which the "
                "step itself uses"
            )
        return _ordered(past | hidden)

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
        tensors = {name: tensor for name, tensor in memory.items() if name not in ("prev_action", "time_idx")}
        hidden = self.traj_encoder.import_hidden_state(tensors, done)
        states, hidden = self.traj_encoder(seq=emb, time_idxs=time_idx[:, None, None], hidden_state=hidden)
        straight = {k: obs[k].unsqueeze(1) for k in self.straight}
        of_each = self.actor.policy_parameters(states, straight_from_obs=straight)  # (B, 1, G, P)
        vec = of_each[:, 0, self.gamma_idx].float()
        policy = action_distribution(self.actor.policy_dist(vec), self.actor.policy_dist)
        stored = policy.sample_action(False)
        past = {"prev_action": self._vector(stored), "time_idx": time_idx + 1}
        memory = _ordered(past | self.traj_encoder.export_hidden_state(hidden))
        action = _ordered({name: self._leaf_to_env(i, stored[:, at]) for i, (name, _, at) in enumerate(self._leaves)})
        return action.get("", action), _ordered(_parameters(policy, vec)), memory

    def _vector(self, stored: Tensor) -> Tensor:
        """A stored action (B, S) as networks read it, (B, A)."""
        columns = []
        for part in self.action_spec.parts:
            column = stored[:, part.stored]
            if part.kind == "discrete":
                column = torch.arange(part.dim, device=stored.device) == column
            columns.append(column.float())
        return torch.cat(columns, dim=1)

    def _leaf_to_env(self, i: int, stored: Tensor) -> Tensor:
        """Stored columns (B, S) of a leaf in the environment's form, (B, ...)."""
        space = self._leaves[i][1].space
        offset, scale, low, high = self.get_buffer(f"leaf_{i}")
        dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
        values = offset + scale * stored.double()
        values = torch.minimum(torch.maximum(values, low), high)
        return (values if dtype.is_floating_point else values.round()).to(dtype).reshape(-1, *(space.shape or ()))

    def example(self, batch_size: int) -> tuple[Tensors, Tensor, Tensor, Tensors]:
        """Arguments of `forward`: zeros, for the first step of a rollout."""
        obs = {k: torch.from_numpy(np.zeros((batch_size, *s.shape), s.dtype)) for k, s in sorted(self.obs_space.spaces.items())}  # type: ignore[misc]
        done = torch.ones(batch_size, dtype=torch.bool)
        return obs, torch.zeros(batch_size), done, self.init_memory(batch_size)

    def batch_axes(self) -> tuple[dict[str, int], int, int, dict[str, int]]:
        """The axis of each argument of `forward` that has size B, in the structure of `example`."""
        axes, three = {}, self.init_memory(3)
        for name, tensor in self.init_memory(2).items():
            differ = [i for i, (a, b) in enumerate(zip(tensor.shape, three[name].shape)) if a != b]
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


def _affine(spec: ActionSpec) -> NDArray[np.float64]:
    """The offset, scale, low and high (4, S) that make actions of a space, neither Tuple nor Dict, from their stored form."""
    space = spec.space
    if isinstance(space, gym.spaces.Box):
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
        return np.stack([(low + high) / 2, (high - low) / 2, low, high])
    start = np.reshape(getattr(space, "start", 0), -1)
    return np.stack(np.broadcast_arrays(np.zeros(spec.stored_dim) + start, 1.0, -np.inf, np.inf))


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


def _folded(module: M) -> M:
    """Replace the `SigmaReparam` layers of ``module`` by linear layers with the same effective weight."""
    for name, child in module.named_children():
        if isinstance(child, SigmaReparam):
            weight = child.effective_weight()
            plain = Linear(weight.shape[1], weight.shape[0], bias=child.bias is not None)
            plain.weight = nn.Parameter(weight)
            if child.bias is not None:
                plain.bias = child.bias
            setattr(module, name, plain)
        else:
            _folded(child)
    return module


# ---- files ----------------------------------------------------------------------------------------------------------------


def export_policy(agent: BaseAgent, path: str | Path) -> Path:
    """Write one step of an agent that takes the mode of its policy: the function `StepModel.forward`.

    An ONNX file has the inputs ``obs.KEY``, ``reward``, ``done`` and ``memory.NAME``, and the outputs ``action`` (``action.KEYS`` for a
    Tuple or Dict space), the parameters of the policy by name, and ``next_memory.NAME``. A ``.pt2`` file is called as
    `StepModel.forward` is. Both hold a description of spaces and memory, in JSON, under the name "amago". PyTorch unpickles parts of
    a ``.pt2`` file when it loads one: load only files that you trust.

    Args:
        agent: its ``rollout_gamma_idx`` chooses the discount that acts.
        path: ends in ``.onnx`` or ``.pt2``; it is returned.

    Raises:
        ValueError: the path has another suffix, the agent cannot be exported, or the exported step takes other actions than the agent.
        ImportError: the packages that ONNX needs are missing.
    """
    path = Path(path).expanduser()
    if path.suffix not in FORMATS:
        known = " or ".join(f"{suffix} ({what})" for suffix, what in FORMATS.items())
        raise ValueError(f"path={str(path)!r} must end in {known}")
    for name in ("onnx", "onnxscript") if path.suffix == ".onnx" else ():
        require(name, "export", "writing ONNX")
    step = StepModel(agent)
    _compare(step, agent)
    # of PyTorch's exporters, such as "torchvision is not installed", which a user cannot act on
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = _onnx(step) if path.suffix == ".onnx" else _pt2(step)
    atomic_write(path, lambda tmp: tmp.write_bytes(content))
    return path


def _traced(step: StepModel) -> Any:
    """The step as a program of ``torch.export``, for any number of environments."""
    example = step.example(2)  # a dimension of size 1 would be traced as a constant
    size = torch.export.Dim("num_envs", min=1)
    obs, reward, done, memory = step.batch_axes()
    shapes = {k: {a: size} for k, a in obs.items()}, {reward: size}, {done: size}, {k: {a: size} for k, a in memory.items()}
    return torch.export.export(step, example, dynamic_shapes=shapes)


def _description(step: StepModel) -> str:
    _, parameters, _ = step(*step.example(2))
    return json.dumps(step.description(parameters), sort_keys=True)


def _pt2(step: StepModel) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_traced(step), buffer, extra_files={METADATA: _description(step)})
    return buffer.getvalue()


def _onnx(step: StepModel) -> bytes:
    example = step.example(2)
    action, parameters, memory = step(*example)
    names = [f"memory.{name}" for name in memory]
    actions = [f"action.{name}" for name in action] if isinstance(action, dict) else ["action"]
    exported = torch.onnx.export(
        _traced(step),
        dynamo=True,
        input_names=[*(f"obs.{key}" for key in example[0]), "reward", "done", *names],
        output_names=[*actions, *parameters, *(f"next_{name}" for name in names)],
        verbose=False,
    )
    assert exported is not None
    model = exported.model_proto
    model.metadata_props.add(key=METADATA, value=_description(step))
    return model.SerializeToString()  # type: ignore[no-any-return]


@torch.no_grad()
def _compare(step: StepModel, agent: BaseAgent, steps: int = 4) -> None:
    """Run the step and the agent side by side; ValueError if their actions differ, as they do for a class that overrides ``act``."""
    device = next(agent.parameters()).device
    space = copy.deepcopy(agent.obs_space)
    space.seed(0)
    theirs, (_, reward, done, mine) = agent.init_hidden_state(2, device), step.example(2)
    with evaluating(agent):
        for t in range(steps):
            rows = [space.sample(), space.sample()]
            obs = {k: torch.from_numpy(np.stack([row[k] for row in rows])) for k in sorted(space.spaces)}
            time_idx = torch.full((2, 1), t, device=device)
            rl2s = rl2_tensor(reward[:, None], mine["prev_action"]).to(device)
            seen = {k: v.to(device) for k, v in obs.items()}
            stored, theirs = agent.get_actions(seen, rl2s, time_idx, theirs, sample=False)
            expected = agent.action_spec.to_vector(stored.cpu().numpy())
            _, _, mine = step(obs, reward, done, mine)
            taken = mine["prev_action"]
            if not np.allclose(taken.numpy(), expected, rtol=1e-3, atol=1e-3):
                raise ValueError(
                    f"the exported step takes {taken.tolist()} where the {type(agent).__name__} takes {expected.tolist()}: its class, or "
                    "that of its actor, chooses actions in a way that cannot be exported"
                )
            reward, done = reward + 0.5, torch.zeros_like(done)
