"""`check_tstep_encoder`: whether a timestep encoder keeps the contract of its base class."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago.agent.checking.common import built, check_gradients, check_output, checking, device_of, differs, width_of
from amago.data.findings import Findings, StopChecking
from amago.nets.tstep_encoders import TstepEncoder
from amago.spaces import action_spec, rl2_space, spaces_of


def check_tstep_encoder(encoder: Any, spaces: Any, *, seed: int = 0) -> None:
    """Try a timestep encoder on random observations, and report what training or acting would stumble over.

    Checked are: that it can be built; the shape, dtype and finiteness of its output, for batches and sequences of several sizes; that
    each timestep is encoded on its own and each sequence on its own; that evaluation mode is deterministic; that the input is left
    alone; that gradients reach all parameters; and, if `inner_forward` takes a ``mask``, that the content of padding makes no difference.

    Args:
        encoder: a subclass of `amago.TstepEncoder`, a function that makes one from ``obs_space`` and ``rl2_space``, or one, of which a
            copy is tried.
        spaces: the environment, a function that makes it, or (observation space, action space).
        seed: of the random inputs and parameters. The process's own random numbers are left as they were.

    Raises:
        CheckError: lists all faults that were found.
        TypeError: an argument is none of these.
    """
    obs_space, action_space = spaces_of(spaces)
    rl2 = rl2_space(action_spec(action_space))
    with checking("check_tstep_encoder found faults of the timestep encoder", seed) as findings:
        module = built(encoder, TstepEncoder, findings, obs_space=obs_space, rl2_space=rl2)
        width, device = width_of(module, findings), device_of(module)
        space = copy.deepcopy(obs_space)
        space.seed(seed)

        def inputs(batch: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
            rows = [space.sample() for _ in range(batch * length)]
            obs = {
                k: torch.from_numpy(np.stack([row[k] for row in rows])).unflatten(0, (batch, length)).to(device)
                for k in space.spaces
            }
            return obs, torch.randn(batch, length, (rl2.shape or (1,))[-1]).to(device)

        for batch, length in ((2, 3), (1, 1)):
            obs, rl2s = inputs(batch, length)
            check_output(_forward(module, obs, rl2s, findings), (batch, length, width), _of_inputs(obs, rl2s), findings)
        zeros = {k: torch.zeros_like(v) for k, v in obs.items()}
        check_output(_forward(module, zeros, rl2s, findings), (1, 1, width), "forward of observations that are all 0", findings)
        _check_each_alone(module, inputs(2, 3), findings)
        obs, rl2s = inputs(2, 3)
        check_gradients(module, lambda: module(obs=obs, rl2s=rl2s), findings)
        if module.takes_mask:
            _check_padding(module, inputs(2, 3), inputs(2, 3), findings)


def _of_inputs(obs: dict[str, Tensor], rl2s: Tensor) -> str:
    shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in obs.items())
    return f"forward of obs {shapes} and rl2s {tuple(rl2s.shape)}"


def _forward(module: Any, obs: dict[str, Tensor], rl2s: Tensor, findings: Findings, **more: Any) -> Any:
    kept = {k: v.clone() for k, v in obs.items()}, rl2s.clone()
    with findings.attempt(_of_inputs(obs, rl2s)):
        out = module(obs=obs, rl2s=rl2s, **more)
        changed = [f"obs[{k!r}]" for k, v in kept[0].items() if k not in obs or not obs[k].equal(v)]
        changed += [] if rl2s.equal(kept[1]) else ["rl2s"]
        if changed:
            findings.add(
                f"forward changes its input {', '.join(changed)} in place; other parts of the agent read it, too: work on a copy"
            )
            raise StopChecking
        return out
    raise StopChecking


def _check_each_alone(module: Any, inputs: tuple[dict[str, Tensor], Tensor], findings: Findings) -> None:
    obs, rl2s = inputs
    out = _forward(module, obs, rl2s, findings)
    if differs(_forward(module, obs, rl2s, findings), out):
        findings.add(
            "in evaluation mode, the same input gives two different outputs: random numbers are for self.training alone"
        )
        return
    for what, rows, steps in (
        ("timestep of a sequence", slice(None), slice(1, 2)),
        ("sequence of a batch", slice(0, 1), slice(None)),
    ):
        alone = _forward(module, {k: v[rows, steps] for k, v in obs.items()}, rl2s[rows, steps], findings)
        if differs(alone, out[rows, steps]):
            findings.add(
                f"a {what} is encoded differently when it comes alone: the output must depend on nothing else "
                "(such as statistics of the batch in evaluation mode, or a dimension that is flattened or summed by mistake)"
            )
            return


def _check_padding(
    module: Any, inputs: tuple[dict[str, Tensor], Tensor], other: tuple[dict[str, Tensor], Tensor], findings: Findings
) -> None:
    """In training mode, what is at padding must change neither outputs at real steps nor running statistics."""
    (obs, rl2s), (filling, _) = inputs, other
    mask = torch.ones(*rl2s.shape[:2], 1, dtype=torch.bool, device=rl2s.device)
    mask[1, 1:] = False
    padded = {k: v.clone() for k, v in obs.items()}
    for k, v in padded.items():
        v[1, 1:] = filling[k][1, 1:]
    results = []
    for each in (obs, padded):
        tried = copy.deepcopy(module).train()
        (torch.manual_seed if rl2s.is_cuda else torch.default_generator.manual_seed)(0)  # equal dropout
        out = _forward(tried, each, rl2s, findings, mask=mask)
        results.append((out[mask[..., 0]], [b.double() for b in tried.buffers()]))
    if differs(results[0][0], results[1][0]):
        findings.add("in training mode, the content of padding (mask False) changes the output of real timesteps")
    elif any(differs(a, b) for a, b in zip(results[0][1], results[1][1]) if a.numel()):
        findings.add("in training mode, the content of padding (mask False) changes running statistics (buffers)")
