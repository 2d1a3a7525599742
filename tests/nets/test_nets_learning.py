"""What networks do otherwise while they learn, for speed and memory: the same numbers and gradients."""

import pytest
import torch
import torch.nn.functional as F

from amago.nets.attention import ScaledDotProductAttention
from amago.nets.utils import activation_switch


def test_leaky_relu_in_place_has_the_gradients_of_torch_and_keeps_its_output_alone():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def act(x):
        return activation_switch("leaky_relu", inplace=True)(1.0 * x)

    assert act(x).equal(F.leaky_relu(x))
    assert torch.autograd.gradcheck(act, x)
    assert torch.autograd.gradgradcheck(act, x)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.clone()) or t, lambda t: t):
        out = act(x)
    assert [t.tolist() for t in kept] == [out.tolist()]
    assert activation_switch("leaky_relu")(x) is not x, "elsewhere the input may be used again"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 7, 300])
def test_attention_that_learns_in_bf16_is_near_float32(length, causal):
    torch.manual_seed(0)
    kernel = ScaledDotProductAttention(causal)
    half = [torch.randn(2, 2, length, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    full = [x.detach().float().requires_grad_() for x in half]
    got, want = kernel(*half), kernel(*full)
    assert got.dtype == torch.bfloat16
    weigh = torch.randn_like(want)
    grads = torch.autograd.grad((got * weigh).sum(), half), torch.autograd.grad((want * weigh).sum(), full)
    for a, b in zip((got, *grads[0]), (want, *grads[1])):
        assert (a.float() - b).norm() <= 0.02 * b.norm() + 1e-6
