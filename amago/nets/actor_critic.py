"""Actors and critics: networks from the state of the sequence model to a policy and an ensemble of values for each discount.

Shapes: see `amago.nets.heads`, which has their base classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import gin
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from amago import config
from amago.compat.names import attributes
from amago.nets import ranks
from amago.nets.ff import MLP, EnsembleMLP, Normalization
from amago.nets.heads import BaseActorHead, BaseCriticHead, EnsembleCritics, Straight, outputs_of
from amago.nets.policy_dists import Discrete, PolicyOutput, TanhGaussian
from amago.nets.twohot import Bins
from amago.nets.utils import Linear, Log, RunningMoments, activation_switch, at_least_float32, check_positive
from amago.ops import gamma_feature

__all__ = [
    "Actor", "BaseActorHead", "BaseCriticHead", "NCritics", "NCriticsTwoHot", "PopArtLayer", "ResidualActor",
    "gammas_as_input_seq",
]  # fmt: skip


def gammas_as_input_seq(gammas: Tensor, batch_size: int, length: int) -> Tensor:
    """The discounts (G,) as an input of critics, h(gamma) (`amago.ops.gamma_feature`): (G * batch_size, length, 1), discount by
    discount."""
    return gamma_feature(gammas.float()).repeat_interleave(batch_size)[:, None, None].expand(-1, length, 1)


LARGEST_RETURN = 100_000.0
"""The value of the last bin of `NCriticsTwoHot` by default."""


@gin.configurable
class Actor(BaseActorHead):
    """An MLP of ``n_layers`` hidden layers, whose outputs are the parameters of every discount's policy; it ignores
    ``straight_from_obs``. Other arguments: `BaseActorHead`."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        n_layers: int = 2,
        d_hidden: int = 256,
        activation: str = "leaky_relu",
        dropout_p: float = 0.0,
        continuous_dist_type: type[PolicyOutput] | None = TanhGaussian,
        discrete_dist_type: type[PolicyOutput] = Discrete,
        action_kind: str | None = None,
    ) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, continuous_dist_type, discrete_dist_type, action_kind)
        self.base = MLP(state_dim, d_hidden, n_layers, self.d_output, activation=activation, dropout_p=dropout_p)

    def actor_network_forward(self, state: Tensor, log_dict: Log = None, straight_from_obs: Straight = None) -> Tensor:
        return self.base(state).unflatten(-1, (self.num_gammas, -1))


class _Elementwise(nn.Module):
    """An activation."""

    def __init__(self, activation: str, inplace: bool) -> None:
        super().__init__()
        self.activation = activation_switch(activation, inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


def _residual_block(feature_dim: int, d_ff: int, normalization: str, activation: str, dropout_p: float) -> nn.Sequential:
    return nn.Sequential(
        Linear(feature_dim, d_ff),
        Normalization(normalization, d_ff),
        _Elementwise(activation, inplace=normalization != "simnorm"),
        Linear(d_ff, feature_dim),
        Normalization(normalization, feature_dim),
        nn.Dropout(dropout_p),
    )


@gin.configurable
class ResidualActor(BaseActorHead):
    """A deeper actor: an MLP to ``feature_dim``, blocks x + N(W2 act(N(W1 x))), and a linear layer to the policies' parameters. It
    ignores ``straight_from_obs``.

    Args (the others are described in `BaseActorHead`):
        feature_dim: width between the blocks.
        residual_ff_dim: width within a block.
        residual_blocks: number of blocks.
        activation, dropout_p: of the MLP and the blocks.
        normalization: N, "layer", "rmsnorm" or "none".
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        feature_dim: int = 256,
        residual_ff_dim: int = 512,
        residual_blocks: int = 2,
        activation: str = "leaky_relu",
        normalization: str = "layer",
        dropout_p: float = 0.0,
        continuous_dist_type: type[PolicyOutput] | None = TanhGaussian,
        discrete_dist_type: type[PolicyOutput] = Discrete,
        action_kind: str | None = None,
    ) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, continuous_dist_type, discrete_dist_type, action_kind)
        check_positive(feature_dim=feature_dim, residual_ff_dim=residual_ff_dim, residual_blocks=residual_blocks)
        self.inp = MLP(state_dim, feature_dim, 1, feature_dim, activation=activation, dropout_p=dropout_p)
        self.residual_blocks = nn.ModuleList(
            _residual_block(feature_dim, residual_ff_dim, normalization, activation, dropout_p) for _ in range(residual_blocks)
        )
        self.out = Linear(feature_dim, self.d_output)

    def actor_network_forward(self, state: Tensor, log_dict: Log = None, straight_from_obs: Straight = None) -> Tensor:
        x = self.inp(state)
        for block in self.residual_blocks:
            x = x + block(x)
        return self.out(x).unflatten(-1, (self.num_gammas, -1))


@gin.configurable
class NCritics(EnsembleCritics):
    """An ensemble of C scalar critics.

    Discrete actions: networks of s output G x A values, and the action vector, a distribution over actions or a one-hot, weighs
    them. Other actions: networks of [s, h(gamma), a], with a clamped to +-0.999.

    Args:
        d_hidden, n_layers, dropout_p, activation: of each network.
        normalization: of its hidden layers before their activation, "layer" or "none" (Ball et al. 2023, arXiv 2302.02948:
            "layer" keeps values of actions that the data lack from growing).
    """

    fused = True

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        num_critics: int = 4,
        d_hidden: int = 256,
        n_layers: int = 2,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
        normalization: str = "none",
    ) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.reads_action = not self.discrete
        d_inp, d_output = (state_dim, len(gammas) * action_dim) if self.discrete else (state_dim + 1 + action_dim, 1)
        self.net = EnsembleMLP(num_critics, d_inp, d_hidden, n_layers, d_output, dropout_p, activation, normalization)

    def all_values(self, state: Tensor, subset: Tensor | None = None) -> Tensor:
        """Discrete actions: the value of each, (B, L, D) -> (B, L, C, G, A); of the critics with the indices ``subset``."""
        return self.scaled(self.net(state, subset).unflatten(-1, (self.num_gammas, self.action_dim)))

    def outputs(self, state: Tensor, action: Tensor, subset: Tensor | None = None) -> Tensor:
        if not self.discrete:
            return super().outputs(state, action, subset)
        self._check_shapes(state, action)
        return (at_least_float32(self.all_values(state, subset)) * action.unsqueeze(3)).sum(dim=-1, keepdim=True)

    def critic_network_forward(self, state: Tensor, action: Tensor, log_dict: Log = None) -> Tensor:
        """(B, L, D), (K, B, L, G, A) -> values (K, B, L, C, G, 1); see `BaseCriticHead.forward`."""
        values = self.outputs(state, action)
        self._log(log_dict, values)
        return values


@gin.configurable
class NCriticsTwoHot(EnsembleCritics):
    """An ensemble of C critics that classify returns into bins instead of regressing them (Farebrother et al. 2024,
    arXiv 2403.03950; Hafner et al. 2023, arXiv 2301.04104).

    For every action space, each is a network from [s, h(gamma), a] to the logits of O bins. A value is the return at
    the expected bin (arXiv 2411.11188).

    Args:
        d_hidden, n_layers, dropout_p, activation: of each network.
        min_return, max_return: of the lowest and the highest bin, in units of return (an agent's ``reward_multiplier``
            included). None: -100,000 and 100,000.
        output_bins: O.
        use_symlog: space the bins evenly in symlog(return); else in the return itself.
        label_type: "twohot" or "hlgauss", see `amago.nets.twohot.Bins`.
        sigma: standard deviation of the latter, in widths of a bin.
        init_value: value of every action before training, for every critic: a return strictly between ``min_return`` and
            ``max_return``. None: the outputs of a random last layer, whose values are near the middle of the bins.
        clamp_labels: clamp targets of "hlgauss" labels to the bins.
        normalization: see `NCritics`.
    """

    fused = True

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        num_critics: int = 4,
        d_hidden: int = 256,
        n_layers: int = 2,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
        min_return: float | None = None,
        max_return: float | None = None,
        output_bins: int = 128,
        use_symlog: bool = True,
        label_type: str = "twohot",
        sigma: float = 0.75,
        init_value: float | None = None,
        clamp_labels: bool = True,
        normalization: str = "none",
    ) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.reads_action = True
        low = -LARGEST_RETURN if min_return is None else min_return
        high = LARGEST_RETURN if max_return is None else max_return
        self.num_bins, self.label_type, self.sigma = output_bins, label_type, sigma
        self.bins = Bins(low, high, output_bins, use_symlog, label_type, sigma, clamp_labels)
        self.net = EnsembleMLP(
            num_critics, state_dim + 1 + action_dim, d_hidden, n_layers, output_bins, dropout_p, activation, normalization
        )
        if init_value is not None:
            nn.init.zeros_(self.net.output_layer.weight)
            self.net.output_layer.bias.data.copy_(self.bins.initial_logits(init_value))

    @property
    def bin_vals(self) -> Tensor:
        """(O,), the centres of the bins; in symlog(return) with ``use_symlog``."""
        return self.bins.centers

    def transform_values(self, returns: Tensor) -> Tensor:
        """Returns on the scale of `bin_vals`."""
        return self.bins.spread(returns)

    def invert_bins(self, values: Tensor) -> Tensor:
        """The returns of numbers on the scale of `bin_vals`."""
        return self.bins.unspread(values)

    def bin_dist_to_raw_vals(self, bin_dist: Categorical) -> Tensor:
        """The returns (..., 1) of distributions over bins (..., O)."""
        return self.bins.value(outputs_of(bin_dist))

    def raw_vals_to_labels(self, raw_td_target: Tensor) -> Tensor:
        """The distributions over bins (..., O) that represent returns (..., 1)."""
        return self.bins.labels(raw_td_target)

    def critic_network_forward(self, state: Tensor, action: Tensor, log_dict: Log = None) -> Categorical:
        """(B, L, D), (K, B, L, G, A) -> distributions over bins (K, B, L, C, G); see `BaseCriticHead.forward`."""
        logits = self.outputs(state, action)
        if log_dict is not None:
            self._log(log_dict, self.bins.value(logits.detach()))
        return Categorical(logits=logits, validate_args=False)


LEAST_SIGMA = 0.01
"""Standard deviation of returns (times ``reward_multiplier``) below which errors are no longer divided by it."""


@gin.configurable
class PopArtLayer(RunningMoments):
    """Running mean and second moment of value targets for each discount, and the affine map that compensates their changes.

    Raw critic outputs Q become w Q + b on the normalised scale, sigma (w Q + b) + mu on the scale of returns; an update of the
    statistics changes w and b so that the latter does not change.

    In the paper w and b are the critics' last layer, which also learns. Here nothing else changes them. Therefore sigma w is
    always sqrt(init_nu), and sigma b + mu is 0: a return is ten times the raw output, whatever the statistics. They
    normalise the critics' loss, ((return - target) / sigma)^2, and the objective of the policy gradient,
    (return - mu) / sigma; the outputs grow with the returns.

    Args:
        gammas: G, number of discounts, or the discounts (G,); all statistics are buffers (G, 1).
        beta: rate of the running statistics after many updates, see `amago.nets.utils.RunningMoments`.
        init_nu: second moment before any data, and the square of returns / raw outputs.
        enabled: if False, every method is the identity and `update_stats` does nothing.
        initial_samples: number of updates that the statistics before any data count as. With 1 their weight falls as 1 / t.
            With 0 the first batch alone sets sigma: where its returns hardly differ, the critics' loss is then very large;
            docs/notes/learning.md compares both.
    """

    w: Tensor
    b: Tensor
    least_sigma: Tensor | None
    """Smallest standard deviation, where `scale_start` may change it; None: `LEAST_SIGMA`."""

    def __init__(
        self,
        gammas: int | Sequence[float] | Tensor,
        beta: float = 5e-4,
        init_nu: float = 100.0,
        enabled: bool = True,
        initial_samples: int = 1,
    ) -> None:
        gammas = gammas if isinstance(gammas, int) else len(gammas)
        check_positive(gammas=gammas)
        super().__init__((gammas, 1), (gammas, 1), beta, init_nu, initial_samples)
        self.enabled = enabled
        self.register_buffer("w", torch.ones(gammas, 1))
        self.register_buffer("b", torch.zeros(gammas, 1))
        self.register_buffer("least_sigma", None)

    def start_scaling(self) -> None:
        """Save `least_sigma` with the statistics, because `scale_start` will change it."""
        self.register_buffer("least_sigma", torch.full((), LEAST_SIGMA, device=self.w.device))

    @property
    def sigma(self) -> Tensor:
        """(G, 1); 1 where disabled."""
        if not self.enabled:
            return torch.ones_like(self.w)
        least = LEAST_SIGMA if self.least_sigma is None else self.least_sigma
        return self.variance.clamp(0.0, 1e8).sqrt().clamp(min=least)

    @torch.no_grad()
    def update_stats(self, val: Tensor, mask: Tensor) -> None:
        """Move the statistics towards new targets.

        Args:
            val: (B, L, 1, G, 1), on the scale of returns.
            mask: broadcastable to ``val``, nonzero where a target is real. A discount without real targets, or with one that is
                not finite, keeps its statistics.
        """
        if not self.enabled:
            return
        mask = (mask != 0).expand_as(val)
        dims = tuple(range(val.ndim - 2))
        kept = torch.where(mask, val.to(self.nu.dtype), 0.0)
        sums, squares, count = ranks.total(kept.sum(dims), kept.square().sum(dims), mask.sum(dims))
        first, second = (x / count.clamp(min=1) for x in (sums, squares))
        use = (count > 0) & torch.isfinite(first) & torch.isfinite(second)
        old_mu, old_sigma = self.mu.clone(), self.sigma
        self._move(first, second, use, use)
        sigma = self.sigma
        # in place: a CUDA graph reads and writes the same memory at each replay
        self.w.mul_(old_sigma / sigma)
        self.b.copy_((old_sigma * self.b + old_mu - self.mu) / sigma)

    @property
    def updates(self) -> Tensor:
        """(), the number of updates of the statistics; of the discount with most updates."""
        return self._t.amax() - self.initial_samples

    @torch.no_grad()
    def scale_start(self, factor: Tensor) -> None:
        """Set the moments before any data for returns ``factor`` times as large; raw outputs keep their meaning."""
        self.nu.mul_(factor.square())
        self.w.div_(factor)
        if self.least_sigma is not None:
            self.least_sigma.mul_(factor)

    def raw(self, size: Tensor) -> Tensor:
        """Sizes of returns on the scale of raw outputs, (G, 1)."""
        return size / (self.sigma * self.w)

    def normalize_values(self, target: Tensor) -> Tensor:
        """(..., G, 1) on the scale of returns -> (target - mu) / sigma."""
        return ((target - self.mu) / self.sigma).to(target.dtype) if self.enabled else target

    def forward(self, x: Tensor, normalized: bool = True) -> Tensor:
        """Raw critic outputs (..., G, 1), on the normalised scale or, if not ``normalized``, on the scale of returns."""
        if not self.enabled:
            return x
        w = self.w.clone() if x.requires_grad else self.w  # a graph of this call must not contain what `update_stats` writes to
        x = w * x + self.b
        return x if normalized else self.sigma * x + self.mu.to(x.dtype)


config.also_known_as(PopArtLayer, "amago.nets.popart.PopArtLayer", "nets.popart.PopArtLayer", "popart.PopArtLayer")


__getattr__ = attributes(__name__)
