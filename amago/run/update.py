"""The optimizer: AdamW, its learning rate schedule, masked losses, and one update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from amago.agent import BaseAgent
from amago.nets import ranks
from amago.run.averaging import WeightAverage
from amago.run.param_groups import Params

MAX_SKIPPED_IN_A_ROW = 20


def adamw(params: Params, learning_rate: float, l2_coeff: float) -> torch.optim.Optimizer:
    """AdamW, in its fused form if the device has one, for parameters or for groups of them (`amago.run.param_groups`)."""
    every = [p for group in params for p in (group["params"] if isinstance(group, dict) else [group])]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in every)
    return torch.optim.AdamW(params, lr=learning_rate, weight_decay=l2_coeff, fused=fused or None)


def lr_factor(step: int, warmup: int, total: int, cooldown: float) -> float:
    """The factor of the learning rate at an update.

    It rises linearly to 1 over the first ``warmup`` updates and falls linearly towards 0 over the last ``cooldown * total``
    updates; after ``total`` updates it keeps its last value.

    Args:
        step: number of the update, from 0.
        warmup: updates of the rise.
        total: updates in all.
        cooldown: share of ``total``, in [0, 1].
    """
    rise = min(1.0, (step + 1) / max(1, warmup))
    last = cooldown * total
    fall = 1.0 if last < 1.0 else min(1.0, max(1.0, total - step) / last)
    return rise * fall


def lr_schedule(
    optimizer: torch.optim.Optimizer, warmup: int, total: int, cooldown: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Multiply an optimizer's learning rates by `lr_factor` at each update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, warmup, total, cooldown))


def total_loss(metrics: Mapping[str, Any], critic_loss_weight: float) -> Tensor:
    """The loss that the metrics of `amago.run.learner.Learner.compute_loss` describe: "Loss", where they have it, else the weighted sum
    of "Actor Loss" and "Critic Loss", and of what an agent adds to it ("Auxiliary Loss")."""
    loss: Tensor
    if "Loss" in metrics:
        loss = metrics["Loss"]
        return loss
    loss = metrics["Actor Loss"] + critic_loss_weight * metrics["Critic Loss"]
    return loss + metrics["Auxiliary Loss"] if "Auxiliary Loss" in metrics else loss


class NonFiniteTraining(RuntimeError):
    """Losses or gradients were not finite in `MAX_SKIPPED_IN_A_ROW` consecutive updates."""


class Updater:
    """Updates an agent: clips the gradient, steps optimizer and schedule, and updates the target networks.

    An update whose loss or gradient is not finite is skipped: parameters stay as they are.

    Args:
        schedule: of ``optimizer``; steps with each update that is not skipped.
        grad_clip: largest norm of the gradient of ``agent.trainable_params``.
        ema_decay: of the average of the weights that acts; 0: there is none.

    Attributes:
        average: of the weights, or None.
        grad_steps: updates so far, without skipped ones.
        skipped: updates skipped so far.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        agent: BaseAgent,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LambdaLR,
        grad_clip: float,
        ema_decay: float = 0.0,
    ):
        self.accelerator, self.agent, self.optimizer, self.schedule = accelerator, agent, optimizer, schedule
        self.params, self.grad_clip, self.ema_decay = list(agent.trainable_params), grad_clip, ema_decay
        self.average = WeightAverage(agent, ema_decay) if ema_decay else None
        self.grad_steps = self.skipped = self._in_a_row = 0

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arguments that it was made with."""
        return self.accelerator, self.agent, self.optimizer, self.schedule, self.grad_clip, self.ema_decay

    def step(self, log_step: bool, loss: Tensor | None = None) -> dict[str, float | Tensor]:
        """Update with the gradients in ``.grad``, and clear them.

        Args:
            log_step: also return the gradient norms of encoders, actor and critics.
            loss: the loss of these gradients; the update is also skipped if this is not finite.

        Returns:
            "Gradient Norm" (before clipping), "Learning Rate" and "Skipped Updates".

        Raises:
            NonFiniteTraining: this is the 20th skipped update in a row.
        """
        metrics: dict[str, float | Tensor] = {}
        if log_step:
            metrics |= self._gradient_norms()
        norm = self.accelerator.clip_grad_norm_(self.params, self.grad_clip)
        assert norm is not None
        scaled = self.accelerator.scaler is not None  # float16: the scaler skips by itself, and lowers its scale
        checked = norm if loss is None else norm + ranks.average(loss.detach())  # all ranks skip, or none
        if not scaled and not checked.isfinite():
            self._skip()
        else:
            self.optimizer.step()
            if scaled and self.accelerator.optimizer_step_was_skipped:
                self._skip()
            else:
                self._in_a_row = 0
                self.grad_steps += 1
                self.schedule.step()
                self.agent.soft_sync_targets()
                if self.average is not None:
                    self.average.update(self.grad_steps)
        self.optimizer.zero_grad(set_to_none=True)
        metrics["Gradient Norm"] = norm.detach()
        metrics["Learning Rate"] = self.schedule.get_last_lr()[0]
        metrics["Skipped Updates"] = float(self.skipped)
        return metrics

    def _skip(self) -> None:
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteTraining(
                f"the loss or its gradient was not finite {self._in_a_row} steps in a row; parameters are as they were before. "
                "Look for NaN or huge values in observations and rewards, or lower learning_rate or reward_multiplier."
            )

    def _gradient_norms(self) -> dict[str, Tensor]:
        scaler = self.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()  # float16: gradients are still multiplied by it
        return {name: norm / scale for name, norm in self.agent.get_grad_norms().items()}

    def state_dict(self) -> dict[str, int]:
        """The counters."""
        return {"grad_steps": self.grad_steps, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counters."""
        self.grad_steps, self.skipped, self._in_a_row = state["grad_steps"], state["skipped"], state["in_a_row"]
