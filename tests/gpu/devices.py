"""The GPU as a parameter of tests, and the precision of its products."""

import sys
from contextlib import contextmanager

import pytest
import torch

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


def real_device(what):
    """A mark that skips a test on a simulated device, which has no ``what``."""
    return pytest.mark.skipif("simcuda" in sys.modules, reason=f"a simulated device has no {what}")


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
