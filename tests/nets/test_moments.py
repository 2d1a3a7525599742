"""Running statistics: of what they have seen, whatever its scale."""

import pytest
import torch

from amago.nets.actor_critic import PopArtLayer
from amago.nets.ff import InputNorm

EVERYTHING = torch.ones(1, 1, 1, 1, 1)


def observed(net, x):
    """Show ``x`` (B, L) to a normaliser of one number."""
    if isinstance(net, InputNorm):
        net.update_stats(x[..., None])
    else:
        net.update_stats(x[:, :, None, None, None], EVERYTHING)


@pytest.mark.parametrize("make", [lambda: InputNorm(1), lambda: PopArtLayer(1, initial_samples=0)], ids=["InputNorm", "PopArt"])
@pytest.mark.parametrize(("mean", "sd"), [(1e3, 1.0), (-1e6, 1.0), (30.0, 0.05), (0.0, 100.0)])
def test_the_first_batch_is_enough(make, mean, sd):
    torch.manual_seed(0)
    net = make()
    for _ in range(50):
        observed(net, mean + sd * torch.randn(24, 128))
        assert float(net.sigma) == pytest.approx(sd, rel=0.1)
        assert float(net.mu) == pytest.approx(mean, abs=0.1 * sd)


def test_the_statistics_are_those_of_all_batches_so_far():
    torch.manual_seed(1)
    net, batches = InputNorm(3), [100 * i + torch.randn(4, 5, 3) for i in range(6)]
    for n, batch in enumerate(batches, start=1):
        net.update_stats(batch)
        seen = torch.cat(batches[:n]).double().flatten(0, 1)
        torch.testing.assert_close(net.mu, seen.mean(0), rtol=2e-3, atol=0.1)
        torch.testing.assert_close(net.sigma.double(), seen.std(0, correction=0), rtol=2e-3, atol=1e-3)


def test_statistics_in_float32_load():
    """Those of the original system, and of agents that were saved before."""
    net = InputNorm(2)
    net.load_state_dict(
        {"mu": torch.tensor([1.0, 2.0]), "nu": torch.tensor([5.0, 8.0]), "_t": torch.tensor([7.0])}, strict=True
    )
    assert net.nu.dtype == torch.float64
    assert net.sigma.tolist() == pytest.approx([2.0, 2.0], rel=1e-5)
    again = InputNorm(2)
    again.load_state_dict(net.state_dict(), strict=True)
    assert again.mu.equal(net.mu)


class NoFloat64:
    """What moving a tensor to such a device does."""

    def __call__(self, x):
        if x.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
        return x.clone()


def test_devices_without_float64_have_float32():
    norm = InputNorm(2)
    norm._apply(NoFloat64())
    assert norm.mu.dtype == norm.nu.dtype == torch.float32
    norm.update_stats(3 + torch.randn(50, 50, 2))
    assert norm.sigma.tolist() == pytest.approx([1.0, 1.0], rel=0.1)
    with pytest.raises(TypeError, match="anything else"):
        norm._apply(lambda x: (_ for _ in ()).throw(TypeError("anything else")))
