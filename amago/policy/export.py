"""Files of a trained policy for programs without amago: one step of `amago.policy.step_model`, as ONNX or for ``torch.export``."""

from __future__ import annotations

import copy
import importlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from amago.agent import BaseAgent
from amago.data.batch import rl2_tensor
from amago.policy.step_model import StepModel
from amago.run.checkpoint import atomic_write

FORMATS = {".onnx": "ONNX, for onnxruntime", ".pt2": "torch.export, for PyTorch"}
METADATA = "amago"
"""The name of the description (JSON) in the file: ``metadata_props`` in ONNX, an extra file in ``.pt2``."""


def export_policy(agent: BaseAgent, path: str | Path) -> Path:
    """Write one step of an agent that acts greedily; see `amago.policy.step_model.StepModel` for the function.

    Args:
        agent: acts by its ``rollout_gamma_idx``.
        path: ends in ``.onnx`` or ``.pt2``. ONNX has inputs ``obs.KEY``, ``reward``, ``done``, ``memory.NAME`` and outputs ``action``
            (of a Tuple or Dict ``action.KEYS``), the names of the policy's parameters, ``next_memory.NAME``; a ``.pt2`` is called as
            `StepModel.forward` is. Either holds a description of its memory and spaces, in JSON, under the name "amago". PyTorch
            unpickles parts of a ``.pt2`` when it loads one: load only those that you trust.

    Returns:
        the path.

    Raises:
        ValueError: another suffix; an agent that cannot be exported, or whose actions the function does not give.
        ImportError: ONNX is asked for, and its packages are missing.
    """
    path = Path(path).expanduser()
    if path.suffix not in FORMATS:
        known = " or ".join(f"{suffix} ({what})" for suffix, what in FORMATS.items())
        raise ValueError(f"path={str(path)!r} must end in {known}")
    if path.suffix == ".onnx":
        _require_onnx()
    step = StepModel(agent)
    _compare(step, agent)
    example = step.example(2)  # PyTorch takes a size of one for a constant
    with torch.no_grad(), _quiet():
        action, parameters, memory = step(*example)
        size = torch.export.Dim("num_envs", min=1)
        obs, reward, done, axes = step.batch_axes()
        shapes = {k: {a: size} for k, a in obs.items()}, {reward: size}, {done: size}, {k: {a: size} for k, a in axes.items()}
        program = torch.export.export(step, example, dynamic_shapes=shapes)
        description = json.dumps(step.description(parameters), sort_keys=True)
        if path.suffix == ".pt2":
            buffer = io.BytesIO()
            torch.export.save(program, buffer, extra_files={METADATA: description})
            content = buffer.getvalue()
        else:
            names = [f"memory.{name}" for name in memory]
            actions = [f"action.{name}" for name in action] if isinstance(action, dict) else ["action"]
            content = _onnx(
                program, [*(f"obs.{key}" for key in obs), "reward", "done", *names],
                [*actions, *parameters, *(f"next_{name}" for name in names)], description,
            )  # fmt: skip

    def write(tmp: Path) -> None:
        tmp.write_bytes(content)

    atomic_write(path, write)
    return path


def _require_onnx() -> None:
    for name in ("onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as err:
            raise ImportError(f"writing ONNX needs {name}: pip install 'amago[export]'") from err


def _onnx(program: Any, inputs: list[str], outputs: list[str], description: str) -> bytes:
    made = torch.onnx.export(program, dynamo=True, input_names=inputs, output_names=outputs, verbose=False)
    assert made is not None
    proto = made.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, description
    content: bytes = proto.SerializeToString()
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's exporters say of their own insides."""
    chatty = logging.getLogger("torch.onnx._internal.exporter._registration")  # "torchvision is not installed"
    level = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings(
                "ignore", r"The tensor attributes? .* assigned during export"
            )  # a GRU's list of its weights
            yield
    finally:
        chatty.setLevel(level)


@torch.no_grad()
def _compare(step: StepModel, agent: BaseAgent, steps: int = 4) -> None:
    """Refuse an agent that acts differently: one whose class has an `act` or a memory of its own, above all."""
    device, was_training = next(agent.parameters()).device, agent.training
    space = copy.deepcopy(agent.obs_space)
    space.seed(0)
    theirs, (_, reward, done, mine) = agent.init_hidden_state(2, device), step.example(2)
    agent.eval()
    try:
        for t in range(steps):
            rows = [space.sample(), space.sample()]
            obs = {k: torch.from_numpy(np.stack([row[k] for row in rows])) for k in sorted(space.spaces)}
            time_idx, prev = (mine[k] * (t > 0) for k in ("time_idx", "prev_action"))
            rl2s = rl2_tensor(reward[:, None], prev)
            stored, theirs = agent.get_actions(
                {k: v.to(device) for k, v in obs.items()}, rl2s.to(device), time_idx[:, None].to(device), theirs, sample=False
            )
            expected = agent.action_spec.to_vector(stored.cpu().numpy())
            _, _, mine = step(obs, reward, done, mine)
            taken = mine["prev_action"]
            if not np.allclose(taken.numpy(), expected, rtol=1e-3, atol=1e-3):
                raise ValueError(
                    f"the exported step takes {taken.tolist()} where the {type(agent).__name__} takes {expected.tolist()}: its class, or "
                    "that of its actor, acts in a way of its own, which cannot be exported"
                )
            reward, done = reward + 0.5, torch.zeros_like(done)
    finally:
        agent.train(was_training)
