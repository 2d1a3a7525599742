"""The GPU as a parameter of tests, and the precision of its products."""

import gc
import sys
from contextlib import contextmanager

import pytest
import torch

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


SIMULATED = "simcuda" in sys.modules


def real_device(what):
    """A mark that skips a test on a simulated device, which has no ``what``."""
    return pytest.mark.skipif(SIMULATED, reason=f"a simulated device has no {what}")


@contextmanager
def tf32(allowed):
    """Whether products of float32 may use TF32, which keeps 10 bits of the mantissa."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def capture(graph, **options):
    """Capture, and leave everything on the device as it was: the simulated one computes while it captures, and a GPU does not."""
    before = [(x, x.detach().clone()) for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.is_cuda]
    random = torch.get_rng_state()
    try:
        with real_capture(graph, **options):
            yield
    finally:
        for x, value in before:
            x.data.copy_(value)  # which raises no version
        torch.set_rng_state(random)


real_capture = torch.cuda.graph


def count_replays(monkeypatch):
    """A list of the replays from now on. On a simulated device captures leave everything as it was from now on, too."""
    calls = []
    if SIMULATED:
        monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted(torch.cuda.CUDAGraph.replay, calls))
    return calls


def counted(function, calls):
    """A function that also appends its arguments to a list."""

    def call(*args):
        calls.append(args)
        return function(*args)

    return call
