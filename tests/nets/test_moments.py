"""Running statistics: of what they have seen, whatever its scale."""

import pytest
import torch

from amago import config
from amago.nets.ff import InputNorm
from amago.nets.moments import RunningMoments
from amago.nets.popart import PopArtLayer

EVERYTHING = torch.ones(1, 1, 1, 1, 1)


def observed(net, x):
    """Show ``x`` (B, L) to a normaliser of one number."""
    if isinstance(net, InputNorm):
        net.update(x[..., None])
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
        net.update(batch)
        seen = torch.cat(batches[:n]).double().flatten(0, 1)
        torch.testing.assert_close(net.mu, seen.mean(0), rtol=2e-3, atol=0.1)
        torch.testing.assert_close(net.sigma.double(), seen.std(0, correction=0), rtol=2e-3, atol=1e-3)


def test_a_small_drift_of_a_large_mean_is_followed():
    """In float32, the mean would not move: a step of the running mean is far below its last digit."""
    net = InputNorm(1, beta=1e-3)
    net.update(torch.full((1, 1, 1), 1e6))
    for _ in range(5000):
        net.update(torch.full((1, 1, 1), 1e6 + 10.0))
    assert float(net.mu) == pytest.approx(1e6 + 10.0, abs=0.1)


def test_the_original_system_counts_the_initial_value():
    config.parse_files(["zoo/original"])
    torch.manual_seed(2)
    norm, popart = InputNorm(1), PopArtLayer(1)
    for net in (norm, popart):
        for _ in range(100):
            observed(net, 1000 + torch.randn(24, 128))
    assert float(norm.sigma) == pytest.approx(98.8, rel=0.01)
    assert float(popart.sigma) == pytest.approx(97.0, rel=0.02)
    assert InputNorm(1, initial_samples=3)._t.tolist() == [3.0]


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


def test_results_keep_the_dtype_of_the_inputs():
    norm, popart = InputNorm(2), PopArtLayer(2, initial_samples=0)
    x = torch.randn(3, 4, 2)
    assert norm(x).dtype == norm(x.bfloat16()).dtype == torch.float32
    assert norm(x.double()).dtype == torch.float64
    values = x[:, :, None, :, None]
    popart.update_stats(values, EVERYTHING)
    assert (
        popart(values).dtype == popart(values, normalized=False).dtype == popart.normalize_values(values).dtype == torch.float32
    )


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
    norm.update(3 + torch.randn(50, 50, 2))
    assert norm.sigma.tolist() == pytest.approx([1.0, 1.0], rel=0.1)
    with pytest.raises(TypeError, match="anything else"):
        norm._apply(lambda x: (_ for _ in ()).throw(TypeError("anything else")))


def test_refusals():
    with pytest.raises(ValueError, match=r"beta must be in \(0, 1\), got beta=1.0"):
        RunningMoments((1,), (1,), 1.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"init_nu must be positive, got init_nu=-1\.0"):
        InputNorm(1, init_nu=-1.0)
    with pytest.raises(ValueError, match="initial_samples must not be negative, got initial_samples=-1"):
        PopArtLayer(1, initial_samples=-1)
