"""Attention backends against the reference that is written out, on each device."""

import pytest
import torch
from gpu.devices import CUDA, real_device

from amago.nets.kv_cache import KVCache
from amago.nets.transformer import (
    FlashAttention,
    FlexAttention,
    ScaledDotProductAttention,
    SlidingWindowFlexAttention,
    SlidingWindowSinkFlexAttention,
)

KERNELS = {
    "default": ScaledDotProductAttention,
    "flash": FlashAttention,
    "flex": FlexAttention,
    "window": lambda: SlidingWindowFlexAttention(window_size=5),
    "sinks": lambda: SlidingWindowSinkFlexAttention(window_size=4, sink_size=2),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


pytestmark = pytest.mark.filterwarnings("ignore:.*using PyTorch's scaled_dot_product_attention")


def reference(kernel, q, k, v):
    """Float64, with the mask of ``kernel``."""
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~kernel.mask(q.shape[2], None, q.device), -torch.inf)
    return scores.softmax(-1) @ v.double()


def relative_error(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


@pytest.mark.filterwarnings("default")  # compilers of other packages warn
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_outputs_and_gradients(name, dtype, device):
    torch.manual_seed(0)
    kernel = KERNELS[name]().to(device)
    qkv = [torch.randn(2, 4, 150, 32, device=device).to(dtype).requires_grad_() for _ in range(3)]
    out, expected = kernel(*qkv), reference(kernel, *qkv)
    weight = torch.randn(expected.shape, device=device)
    grads = torch.autograd.grad((out * weight).sum(), qkv), torch.autograd.grad((expected * weight).sum(), qkv)
    assert out.dtype == dtype
    for got, want in zip((out, *grads[0]), (expected, *grads[1])):
        assert relative_error(got, want.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
@torch.no_grad()
def test_steps_with_staggered_resets(name, dtype, device):
    torch.manual_seed(1)
    kernel = KERNELS[name]().to(device)
    slots = kernel.cache_slots(30)
    cache = KVCache(1, 3, 2, slots, 16, device, dtype, sinks=kernel.sink_size)
    qkv = torch.randn(3, 3, 2, 24, 16, device=device).to(dtype)
    starts = torch.tensor([0, 7, 13])
    got = []
    for t in range(24):
        cache.reset(starts == t)
        step = cache.advance()
        q, k, v = qkv[:, :, :, t : t + 1]
        got.append(kernel(q, *cache.write(0, k, v, step), step))
    for row, start in enumerate(starts.tolist()):
        expected = reference(kernel, *qkv[:, row : row + 1, :, start:])
        assert relative_error(torch.cat(got, 2)[row : row + 1, :, start:], expected) < TOLERANCE[dtype]


@real_device("kernel of flex_attention")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_the_flex_kernel_itself_runs(device):
    """Falling back would pass the tests above."""
    q = torch.randn(3, 2, 4, 150, 32, device=device)
    kernel = SlidingWindowFlexAttention(window_size=5)
    kernel(*q)
    assert kernel.failures["cuda", torch.float32, 32] is None
