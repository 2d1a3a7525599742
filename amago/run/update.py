"""From the losses of a batch to a step of the optimizer."""

from __future__ import annotations

import ctypes
import sys

import torch
from accelerate import Accelerator
from torch import Tensor

from amago import ops
from amago.agent import AgentLoss, BaseAgent
from amago.loading import Batch

MAX_SKIPPED_IN_A_ROW = 20


def adamw(params: list[torch.nn.Parameter], learning_rate: float, l2_coeff: float) -> torch.optim.Optimizer:
    """AdamW in its fused form where the device has one."""
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
    return torch.optim.AdamW(params, lr=learning_rate, weight_decay=l2_coeff, fused=fused or None)


def keep_freed_memory() -> bool:
    """Let this process keep the memory that tensors free, for the next ones; True where that was possible (glibc).

    By default much of it goes back to the system after an update, and every page is cleared again on its next use: 6% of an update
    of `Agent` (24 sequences of 128 timesteps, one core). Tensors of 32 MB and more still go back: to keep these too would save 4%
    where there are many, and scatter the heap (674 MB, and growing, where 581 do).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    trim_threshold, mmap_threshold = -1, -3
    return mallopt is not None and all([mallopt(mmap_threshold, 2**25), mallopt(trim_threshold, 2**31 - 1)])


def lr_factor(step: int, warmup: int, total: int, cooldown: float) -> float:
    """What the learning rate is multiplied by at an update, counted from 0.

    It rises linearly to 1 over the first ``warmup`` of ``total`` updates and falls linearly towards 0 over the last ``cooldown``
    (a share) of them; past ``total`` it stays at its lowest.
    """
    rise = min(1.0, (step + 1) / max(1, warmup))
    last = cooldown * total
    fall = 1.0 if last < 1.0 else min(1.0, max(1.0, total - step) / last)
    return rise * fall


def lr_schedule(
    optimizer: torch.optim.Optimizer, warmup: int, total: int, cooldown: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of `lr_factor` for an optimizer."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, warmup, total, cooldown))


def weighted_losses(loss: AgentLoss, batch: Batch, actor_mask: Tensor, critic_mask: Tensor | None) -> dict[str, float | Tensor]:
    """Masked means of the two losses, and the sizes of the batch, under the names of the log."""
    actor = ops.masked_mean(loss.actor_loss, actor_mask)
    critic = torch.zeros_like(actor)
    if loss.critic_loss is not None and critic_mask is not None:
        critic = ops.masked_mean(loss.critic_loss, critic_mask)
    b, length = batch.rews.shape[:2]
    real = batch.transition_mask.sum()
    return {
        "Actor Loss": actor,
        "Critic Loss": critic,
        "Sequence Length": float(length + 1),
        "Batch Size (in Timesteps)": float(b * length),
        "Unmasked Batch Size (in Timesteps)": real.float(),
        **loss.metrics,
    }


class NonFiniteTraining(RuntimeError):
    """Losses or gradients were not finite many steps in a row."""


class Updater:
    """One optimizer step: clip, refuse what is not finite, step, let targets follow.

    Attributes:
        skipped: steps refused so far because the loss or the gradient was not finite.
        grad_steps: steps taken.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        agent: BaseAgent,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LambdaLR,
        grad_clip: float,
    ):
        self.accelerator, self.agent, self.optimizer, self.schedule = accelerator, agent, optimizer, schedule
        self.params, self.grad_clip = agent.trainable_params, grad_clip
        if accelerator.device.type == "cpu":
            keep_freed_memory()
        self.grad_steps = self.skipped = self._in_a_row = 0

    def step(self, log_step: bool, loss: Tensor | None = None) -> dict[str, float | Tensor]:
        """Use the gradients that ``backward`` left.

        Args:
            log_step: also measure the gradients of the parts.
            loss: that ``backward`` began from; a step is also refused where this is not finite.

        Raises:
            NonFiniteTraining: for the 20th time in a row there was nothing finite to use.
        """
        metrics: dict[str, float | Tensor] = {}
        if log_step:
            metrics |= self._gradient_norms()
        norm = self.accelerator.clip_grad_norm_(self.params, self.grad_clip)
        assert norm is not None
        scaled = self.accelerator.scaler is not None  # float16: the scaler itself skips, and lowers its scale
        if not scaled and not (norm if loss is None else norm + loss.detach()).isfinite():
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
        parts = {"TstepEncoder": "tstep_encoder", "TrajEncoder": "traj_encoder", "Actor": "actor", "Critics": "critics"}
        out = {}
        for label, name in parts.items():
            module = getattr(self.agent, name, None)
            if module is not None:
                out[f"{label} Grad Norm"] = ops.global_norm([p.grad for p in module.parameters() if p.grad is not None])
        return out

    def state_dict(self) -> dict[str, int]:
        return {"grad_steps": self.grad_steps, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.grad_steps, self.skipped, self._in_a_row = state["grad_steps"], state["skipped"], state["in_a_row"]
