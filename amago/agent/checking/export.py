"""Whether a sequence model's step can be exported and then does the same; a part of `amago.check_traj_encoder`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amago.data.findings import Findings
from amago.nets.traj_encoders import TrajEncoder

Tensors = dict[str, Tensor]
TAKEN = ("prev_action", "time_idx")
"""Names of memory that an exported policy uses itself."""


class _Step(nn.Module):
    """One step of a sequence model without state, as `amago.policy.step_model.StepModel` takes it."""

    def __init__(self, module: TrajEncoder):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, times: Tensor, dones: Tensor, memory: Tensors) -> tuple[Tensor, Tensors]:
        hidden = self.module.import_hidden_state(memory, dones)
        out, hidden = self.module(seq=x.unsqueeze(1), time_idxs=times[:, None, None], hidden_state=hidden)
        return out[:, 0], dict(sorted(self.module.export_hidden_state(hidden).items()))


def check_export(module: TrajEncoder, seq: Tensor, findings: Findings, differs: Callable[[Tensor, Tensor], bool]) -> None:
    """Compare steps with exported and imported hidden states, and of a traced program, with whole sequences.

    Args:
        module: in evaluation mode; its steps equal whole sequences.
        seq: (B, L, D).
        differs: compares two outputs.
    """
    n, device, step = len(seq), seq.device, _Step(module)
    way_out = "; pass export=False if the agent is never to be exported"
    memory: Tensors = {}
    try:
        memory = _exported(module, n, device)
        three = _exported(module, n + 1, device)
    except Exception as err:
        findings.add(f"export_hidden_state raised {type(err).__name__}: {err}{way_out}")
        return
    for name, tensor in memory.items():
        if sum(a != b for a, b in zip(tensor.shape, three[name].shape)) != 1:
            findings.add(
                f"export_hidden_state: {name!r} has shape {tuple(tensor.shape)}, of which exactly one must count actors{way_out}"
            )
        if name in TAKEN:
            findings.add(f"export_hidden_state must not use the name {name!r}, which the exported policy uses itself")
    if not findings and _same(module, step, "steps with export_hidden_state and import_hidden_state", seq, findings, differs):
        traced = _traced(step, seq, memory, findings, way_out)
        if traced is not None:
            _same(module, traced, "the step that torch.export made", seq, findings, differs)


def _exported(module: TrajEncoder, rows: int, device: torch.device) -> Tensors:
    return dict(sorted(module.export_hidden_state(module.init_hidden_state(rows, device)).items()))


def _same(
    module: TrajEncoder, step: Any, what: str, seq: Tensor, findings: Findings, differs: Callable[[Tensor, Tensor], bool]
) -> bool:
    """Whether two rollouts in a row, the second after ``dones``, equal whole sequences, and arguments stay as they are."""
    n, length, _ = seq.shape
    times = torch.arange(length, device=seq.device).expand(n, -1)
    expected, _ = module(seq=seq, time_idxs=times.unsqueeze(-1), hidden_state=None)
    memory = _exported(module, n, seq.device)
    with findings.attempt(what):
        for t in range(2 * length):
            dones = torch.full((n,), t == length, device=seq.device)
            before = {k: v.clone() for k, v in memory.items()}
            out, following = step(seq[:, t % length], times[:, t % length], dones, memory)
            if differs(out, expected[:, t % length]):
                late = " after all rows were done" if t >= length else ""
                findings.add(f"{what} give{'s' * what.startswith('the')} another output than whole sequences{late} (step {t})")
                return False
            changed = [k for k, v in before.items() if not memory[k].equal(v)]
            if changed:
                findings.add(
                    f"{what}: the memory {', '.join(changed)} is changed in place; import_hidden_state must copy what is written"
                )
                return False
            memory = following
        return True
    return False


def _traced(step: _Step, seq: Tensor, memory: Tensors, findings: Findings, way_out: str) -> Any:
    """The step as a program of ``torch.export`` for any number of actors; None if that fails."""
    n = len(seq)
    three = _exported(step.module, n + 1, seq.device)
    size = torch.export.Dim("num_envs", min=1)
    axes = {k: {next(i for i, (a, b) in enumerate(zip(v.shape, three[k].shape)) if a != b): size} for k, v in memory.items()}
    zeros = torch.zeros(n, dtype=torch.int64, device=seq.device)
    example = seq[:, 0].contiguous(), zeros, zeros.bool(), memory
    chatty = logging.getLogger("torch")
    level = chatty.level
    chatty.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(step, example, dynamic_shapes=({0: size}, {0: size}, {0: size}, axes))
            return program.module()
    except Exception as err:
        reason = next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
        findings.add(f"torch.export cannot trace a step: {type(err).__name__}: {reason}{way_out}")
        return None
    finally:
        chatty.setLevel(level)
