"""The helpers of `amago.utils` that need torch, and the statistics of agents that override ``forward``.

Facts served: scripts import means over masks, gradient norms, schedules, checkpoint loading and reductions over processes from
`amago.utils`; agents that compute their loss themselves fill ``update_info`` with the results of ``_td_stats``, ``_policy_stats``,
``_filter_stats`` and ``_popart_stats``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gin
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from amago import config, ops
from amago.describe import describe
from amago.nets import ranks


def masked_avg(tensor: Tensor, mask: Tensor | float = 1.0) -> Tensor:
    """sum(tensor x mask) / (sum(mask) + 1e-5), a scalar; 0 where the mask is empty.

    `amago.nets.ranks.masked_mean` also ignores values outside of the mask that are not finite.
    """
    weights = torch.as_tensor(mask, device=tensor.device).to(tensor.dtype).expand_as(tensor)
    return (tensor * weights).sum() / (weights.sum() + 1e-5)


def get_grad_norm(module: nn.Module) -> float:
    """The 2-norm of the gradients of all parameters of a module together; 0 where there are none."""
    return float(ops.global_norm([p.grad.detach() for p in module.parameters() if p.grad is not None]))


def count_params(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def get_constant_schedule_with_warmup(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that rises from 0 to the optimizer's in ``num_warmup_steps`` equal steps and then stays constant."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / max(1, num_warmup_steps)), last_epoch)


def retry_load_checkpoint(
    ckpt_path: str | os.PathLike[str], map_location: torch.device | str | None = None, tries: int = 10
) -> Any:
    """Load a file of ``torch.save`` that another process may be writing; None if there is no such file.

    Anything that needs code to load, such as a pickled object, is refused. Attempts are 0.1 to 1 seconds apart; the last error is raised.
    """
    attempt = 1
    while Path(ckpt_path).exists():
        try:
            return torch.load(ckpt_path, map_location=map_location, weights_only=True)
        except Exception:
            if attempt >= tries:
                raise
        time.sleep(min(1.0, 0.1 * attempt))
        attempt += 1
    return None


def gin_as_wandb_config() -> dict[str, Any]:
    """All bindings in force, {"selector.parameter": value}; values that are no numbers, texts or lists of these as text."""
    return {name: describe(value) for name, value in config.bindings().items()}


def sum_over_accelerate(data: Mapping[str, Any]) -> dict[str, float]:
    """The sum of each number, or tensor of one element, over all processes of the run; they have the same keys in each."""
    return _reduced(data, "sum")


def avg_over_accelerate(data: Mapping[str, Any]) -> dict[str, float]:
    """The mean of each number over all processes of the run; see `sum_over_accelerate`."""
    return _reduced(data, "mean")


def _reduced(data: Mapping[str, Any], how: str) -> dict[str, float]:
    from accelerate import PartialState
    from accelerate.utils import reduce

    device = PartialState().device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    numbers = {
        name: torch.tensor(float(data[name]), dtype=dtype, device=device) for name in sorted(data)
    }  # one order in all processes
    total = reduce(numbers, reduction=how)
    return {name: float(total[name]) for name in data}


@gin.configurable(module="amago.utils")
class AdamWRel(torch.optim.AdamW):
    """AdamW whose step count, on which the bias correction depends, returns to 0 after every ``reset_interval`` steps.

    That suits targets that change: the first steps after each change are larger (Adam-Rel, Ellis et al. 2024, arXiv 2412.17113). The
    other arguments: see `torch.optim.AdamW`.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        reset_interval: int = gin.REQUIRED,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if reset_interval < 1:
            raise ValueError(f"reset_interval must be at least 1, got reset_interval={reset_interval}")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, **options)
        self.reset_interval = reset_interval

    @torch.no_grad()
    def step(self, closure: object = None) -> Any:
        """One step; before it, parameters that have taken ``reset_interval`` steps start counting again."""
        for group in self.param_groups:
            for parameter in group["params"]:
                count = self.state[parameter].get("step") if parameter in self.state else None
                if count is not None and count >= self.reset_interval:
                    self.state[parameter]["step"] = torch.zeros_like(count)
        return super().step(closure)


class LossStatistics:
    """The methods above. None of them affects training. Tensors may have a row for the last observation too, which no mask of
    transitions has: it does not count."""

    popart: Any

    @torch.no_grad()
    def _td_stats(self, mask: Tensor, *values: Tensor, **named: Tensor) -> dict[str, Tensor]:
        """Mean and standard deviation of tensors (B, L, ...), named by their keyword, or by their position as "TD Statistic 1".

        ``mask``, (B, L, 1) or wider, such as (B, L, C, G, 1), is True where a transition counts.
        """
        tensors = {f"TD Statistic {i}": x for i, x in enumerate(values, start=1)} | named
        out = {}
        for name, x in tensors.items():
            x, real = _matched(x, mask)
            out[f"{name} (mean)"], out[f"{name} (std)"] = ranks.masked_mean(x.float(), real), ranks.masked_std(x.float(), real)
        return out

    @torch.no_grad()
    def _policy_stats(self, mask: Tensor, dist: Distribution) -> dict[str, Tensor]:
        """The entropy of policies (B, L, G), where their class has one; ``mask`` as of `_td_stats`."""
        try:
            entropy = dist.entropy()
        except NotImplementedError:
            return {}
        entropy = entropy.unsqueeze(-1) if entropy.ndim == 3 else entropy  # of independent parts: (B, L, G, A)
        return {"Policy Entropy": ranks.masked_mean(*_matched(entropy, mask))}

    @torch.no_grad()
    def _filter_stats(self, mask: Tensor, logp: Tensor, filter: Tensor) -> dict[str, Tensor]:
        """Weights (B, L, G, 1) of stored actions, and the log-probabilities of the actions; ``mask`` as of `_td_stats`."""
        return {
            "Filter Weight": ranks.masked_mean(*_matched(filter.float(), mask)),
            "Pct. of Actions Approved by Filter": 100.0 * ranks.masked_mean(*_matched((filter > 0).float(), mask)),
            "Log-Probability of Actions": ranks.masked_mean(*_matched(logp, mask)),
        }

    @torch.no_grad()
    def _popart_stats(self) -> dict[str, Tensor]:
        """Mean and standard deviation of TD targets by the number of their discount."""
        found = {"mu": self.popart.mu, "sigma": self.popart.sigma}
        return {f"PopArt {name} ({g})": x.clone() for name, values in found.items() for g, x in enumerate(values.flatten())}


def _matched(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` and a mask (B, L, ...) of one shape, the mask as bool: without the row of the last observation, if only one of them has it;
    dimensions that the mask lacks come before its last, and dimensions of size 1 are repeated."""
    mask = mask.bool()
    while mask.ndim < x.ndim:
        mask = mask.unsqueeze(-2)
    length = min(x.shape[1], mask.shape[1])
    if max(x.shape[1], mask.shape[1]) > length + 1:
        raise ValueError(
            f"values of shape {tuple(x.shape)} and a mask of shape {tuple(mask.shape)} differ by more than the last observation"
        )
    x, mask = torch.broadcast_tensors(x[:, :length], mask[:, :length])
    return x, mask
