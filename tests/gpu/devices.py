"""The GPU as a parameter of tests, and the precision of its products."""

from contextlib import contextmanager

import pytest
import torch

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


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
