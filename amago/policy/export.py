"""Write a trained policy as ONNX or for ``torch.export``: one step of `amago.policy.step_model`, for programs without amago."""

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
"""Name of the description (JSON) in the file: an entry of ``metadata_props`` in ONNX, an extra file in ``.pt2``."""


def export_policy(agent: BaseAgent, path: str | Path) -> Path:
    """Write one step of an agent that takes the mode of its policy: the function `amago.policy.step_model.StepModel.forward`.

    An ONNX file has the inputs ``obs.KEY``, ``reward``, ``done`` and ``memory.NAME``, and the outputs ``action`` (``action.KEYS`` for a
    Tuple or Dict space), the parameters of the policy by name, and ``next_memory.NAME``. A ``.pt2`` file is called as
    `StepModel.forward` is. Both hold a description of spaces and memory, in JSON, under the name "amago". PyTorch unpickles parts of
    a ``.pt2`` file when it loads one: load only files that you trust.

    Args:
        agent: its ``rollout_gamma_idx`` chooses the discount that acts.
        path: ends in ``.onnx`` or ``.pt2``.

    Returns:
        the path.

    Raises:
        ValueError: the path has another suffix, the agent cannot be exported, or the exported step takes other actions than the agent.
        ImportError: the packages that ONNX needs are missing.
    """
    path = Path(path).expanduser()
    if path.suffix not in FORMATS:
        known = " or ".join(f"{suffix} ({what})" for suffix, what in FORMATS.items())
        raise ValueError(f"path={str(path)!r} must end in {known}")
    if path.suffix == ".onnx":
        _require_onnx()
    step = StepModel(agent)
    _compare(step, agent)
    with torch.no_grad(), _quiet():
        content = _onnx(step) if path.suffix == ".onnx" else _pt2(step)

    def write(tmp: Path) -> None:
        tmp.write_bytes(content)

    atomic_write(path, write)
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
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA, _description(step)
    content: bytes = model.SerializeToString()
    return content


def _require_onnx() -> None:
    for name in ("onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as err:
            raise ImportError(f"writing ONNX needs {name}: pip install 'amago[export]'") from err


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of PyTorch's exporters that a user cannot act on."""
    chatty = logging.getLogger("torch.onnx._internal.exporter._registration")  # "torchvision is not installed"
    level = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            # torch.nn.GRU assigns its list of weights while it is traced
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
            yield
    finally:
        chatty.setLevel(level)


@torch.no_grad()
def _compare(step: StepModel, agent: BaseAgent, steps: int = 4) -> None:
    """Run the step and the agent side by side.

    Raises:
        ValueError: their actions differ, as they do for an agent whose class overrides ``act``.
    """
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
                    "that of its actor, chooses actions in a way that cannot be exported"
                )
            reward, done = reward + 0.5, torch.zeros_like(done)
    finally:
        agent.train(was_training)
