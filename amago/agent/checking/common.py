"""What the checks of all parts share: findings, a part to try, its output and its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from amago.data.findings import Findings, StopChecking

TOLERANCE = 1e-3
"""Largest difference, relative to the size of the output, between two ways to the same output: much more than rounding in float32."""


@contextmanager
def checking(what: str, seed: int) -> Iterator[Findings]:
    """Findings that are raised at the end of the block, in which random numbers are seeded, and restored afterwards."""
    findings = Findings(what)
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` also seeds GPUs that are not in use yet
        with suppress(StopChecking):
            yield findings
    findings.finish()


def built(part: Any, base: type[nn.Module], findings: Findings, **arguments: Any) -> Any:
    """An encoder on which to try things: made by the class or function ``part``, or a copy of it if it is one already."""
    if isinstance(part, base):
        return copy.deepcopy(part).eval()
    if not callable(part):
        raise TypeError(f"{part!r} must be a subclass of {base.__name__}, a function that makes one, or one")
    name = getattr(part, "__name__", repr(part))
    made = None
    with findings.attempt(f"{name}({', '.join(arguments)})"):
        made = part(**arguments)
    if findings:
        raise StopChecking
    if not isinstance(made, base):
        findings.add(f"{name} made a {type(made).__name__}, but must make a subclass of amago.{base.__name__}")
        raise StopChecking
    return made.eval()


def width_of(encoder: Any, findings: Findings) -> int:
    """E, which the encoder must say in ``emb_dim``."""
    with findings.attempt("emb_dim"):
        width = encoder.emb_dim
        if isinstance(width, int) and width >= 1:
            return width
        findings.add(f"emb_dim is {width!r}, but must be the number of outputs of a timestep, at least 1")
    raise StopChecking


def check_output(out: Any, shape: tuple[int, ...], doing: str, findings: Findings) -> None:
    """An output must be a tensor of real numbers of this shape; stop if it is not."""
    if not isinstance(out, Tensor):
        findings.add(f"{doing} returned a {type(out).__name__}, but must return a tensor {shape}")
    elif tuple(out.shape) != shape:
        findings.add(f"{doing} returned shape {tuple(out.shape)}, but must return {shape}: (batch, length, emb_dim)")
    elif not out.is_floating_point():
        findings.add(f"{doing} returned {out.dtype}, but must return real numbers")
    elif not torch.isfinite(out).all():
        findings.add(f"{doing} returned {out[~torch.isfinite(out)][0].item()} for finite input")
    else:
        return
    raise StopChecking


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs differ by more than rounding does."""
    return bool((a - b).abs().max() > TOLERANCE * (1.0 + float(b.abs().max())))


def check_gradients(encoder: nn.Module, forward: Callable[[], Tensor], findings: Findings) -> None:
    """In training mode, every parameter that is to be trained must get a finite gradient."""
    encoder.train()
    with findings.attempt("training: forward and backward"), torch.enable_grad():
        out = forward()
        (out * torch.randn(out.shape).to(out)).sum().backward()
        trained = [(name, p) for name, p in encoder.named_parameters() if p.requires_grad]
        lacking = [name for name, p in trained if p.grad is None]
        if lacking:
            findings.add(
                f"no gradient reaches {', '.join(lacking)}: they would never be trained (is a part unused, or its output detached?); "
                "parameters that are to stay as they are need requires_grad_(False)"
            )
        infinite = [name for name, p in trained if p.grad is not None and not torch.isfinite(p.grad).all()]
        if infinite:
            findings.add(f"the gradient of {', '.join(infinite)} is not finite for finite input")
    encoder.zero_grad(set_to_none=True)
    encoder.eval()


def device_of(encoder: nn.Module) -> torch.device:
    return next((p.device for p in [*encoder.parameters(), *encoder.buffers()]), torch.device("cpu"))
