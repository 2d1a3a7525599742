"""How a policy of choices draws, on a CPU by sums of probabilities and on a GPU by scores."""

import pytest
import torch

from amago.nets.policy_dists import Discrete


@pytest.mark.parametrize("choices", [3, 100])
def test_indices_are_drawn_by_their_probabilities_and_illegal_ones_never(choices, device):
    torch.manual_seed(6)
    n, kind = 100_000, Discrete(choices, clip_prob_low=0.0)
    legal = torch.rand(2, choices, device=device) < 0.5
    legal[:, 0], legal[:, -1] = True, False
    dist = kind(kind.masked(torch.randn(2, choices, device=device), legal))
    drawn = dist.sample((n,))
    assert drawn.shape == (n, 2, 1)
    for row in range(2):
        share = torch.bincount(drawn[:, row, 0], minlength=choices) / n
        torch.testing.assert_close(share, dist.probs[row], rtol=0, atol=0.006)
        assert not share[~legal[row]].any()
    broken = kind(torch.full((2, choices), torch.nan, device=device))
    if device.type == "cuda":  # for which the host does not wait
        assert (broken.sample() == choices).all(), "out of range, which acting refuses"
        return
    with pytest.raises(ValueError, match="NaN"):
        broken.sample()
