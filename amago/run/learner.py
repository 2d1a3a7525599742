"""The learning part of an experiment: the model, its optimizer, and what happens to a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from amago.agent import BaseAgent
from amago.data.batch import Batch
from amago.nets.ranks import joint_batch
from amago.run import parameters
from amago.run.checks import SettingsError
from amago.run.collect import Spaces
from amago.run.param_groups import ignored_settings, param_groups
from amago.run.ranks import TIMEOUT, leave_at_exit, ranks_on_cpus
from amago.run.settings import ExperimentSettings
from amago.run.td_errors import report_td_errors
from amago.run.update import Updater, adamw, lr_schedule, total_loss


class Learner(ExperimentSettings):
    """Base class of `amago.Experiment`: model, losses and updates. Override its methods to change what is learned from a batch.

    Where several ranks train together, an update is that of one process with the batches of all of them (`amago.nets.ranks`).

    Attributes:
        policy_aclr: the agent, in Accelerate's wrapper. It may be replaced by any module that acts (`amago.compat.acting`).
        optimizer, lr_schedule: of the agent; without ``builds_optimizer``, there are none.
        builds_optimizer: whether this process may train. One that only collects need not have an optimizer.
    """

    policy_aclr: Any
    optimizer: Any
    lr_schedule: torch.optim.lr_scheduler.LambdaLR
    builds_optimizer = True
    _accelerator: Accelerator | None = None
    _own_accelerator: tuple[Accelerator, int, str] | None = None  # that was built here, and for which settings
    _unwrapped: tuple[Any, BaseAgent] | None = None  # the wrapper, and the agent in it
    _updater: Updater | None = None
    _calls: parameters.Calls | None = None  # of configurables, when the agent was built

    @property
    def accelerator(self) -> Accelerator:
        """Device, precision and processes. It is made when it is first asked for, before or in ``start()``; set it to use another."""
        if self._accelerator is None:
            self._build_accelerator()
        assert self._accelerator is not None
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def _build_accelerator(self) -> None:
        """Make the accelerator for the settings of now, unless there is one for them, or one that was set."""
        wanted = self.batches_per_update, self.mixed_precision
        known = self._own_accelerator
        if self._accelerator is not None and (known is None or known[0] is not self._accelerator):
            return
        if known is not None and known[1:] == wanted and known[0].mixed_precision == self.mixed_precision:
            return
        AcceleratorState._reset_state()  # otherwise an earlier experiment of this process decides the precision
        self._accelerator = Accelerator(
            gradient_accumulation_steps=self.batches_per_update,
            mixed_precision=self.mixed_precision,
            cpu=ranks_on_cpus(),
            kwargs_handlers=[
                DistributedDataParallelKwargs(find_unused_parameters=True),
                InitProcessGroupKwargs(timeout=TIMEOUT),
            ],
        )
        self._own_accelerator = (self._accelerator, *wanted)
        if self._accelerator.num_processes > 1:
            leave_at_exit()

    def _build_model(self, spaces: Spaces) -> None:
        """Build the agent, its optimizer and schedule."""
        agent_type: Any = self.agent_type  # `resolve` has replaced names by classes
        parts: dict[str, Any] = {"tstep_encoder_type": self.tstep_encoder_type, "traj_encoder_type": self.traj_encoder_type}
        with parameters.recording() as self._calls:
            agent = agent_type(
                obs_space=spaces.observation,
                rl2_space=spaces.rl2,
                action_space=spaces.action,
                max_seq_len=self.max_seq_len,
                **parts,
            ).to(self.DEVICE)
        if self.critic_loss_weight is not None:
            agent.critic_loss_weight = float(self.critic_loss_weight)
        if not self.builds_optimizer and self.resume == "never":
            self.policy_aclr = self.accelerator.prepare_model(agent, evaluation_mode=True)
            return
        optimizer = self.init_optimizer(agent)
        if ignored := ignored_settings(self, optimizer):
            raise SettingsError(
                f"init_optimizer of {type(self).__name__} does not use {', '.join(ignored)}: build its optimizer from "
                "amago.run.param_groups.param_groups(policy, self) in place of policy.trainable_params, or leave these out"
            )
        self.policy_aclr, self.optimizer = self.accelerator.prepare(agent, optimizer)
        learning_epochs = max(0, self.epochs - int(min(self.start_learning_at_epoch, self.epochs)))
        updates = learning_epochs * self.train_batches_per_epoch // self.batches_per_update
        self.lr_schedule = lr_schedule(self.optimizer, self.lr_warmup_steps, updates, self.lr_cooldown)
        self.accelerator.register_for_checkpointing(self.lr_schedule)  # for those who call accelerator.save_state()

    @property
    def updater(self) -> Updater:
        """What updates the policy; made anew where policy, optimizer or schedule were replaced."""
        parts = self.accelerator, self.policy, self.optimizer, self.lr_schedule, self.grad_clip, self.ema_decay
        known = self._updater
        if known is None or any(a is not b for a, b in zip(known.parts, parts)):
            self._updater = Updater(*parts)
            if known is not None:
                self._updater.load_state_dict(known.state_dict())
        assert self._updater is not None
        return self._updater

    def acting_weights(self) -> AbstractContextManager[Any]:
        """In the block, the policy has the weights with which it acts: with ``ema_decay``, their average."""
        average = None if self._updater is None else self._updater.average
        return nullcontext() if average is None else average.acting()

    def _weights_loaded(self) -> None:
        """The policy has other weights than those that training has led to: an average begins with them."""
        if self._updater is not None and self._updater.average is not None:
            self._updater.average.restart()

    @property
    def grad_update_counter(self) -> int:
        """Updates of the policy so far. A `train_step` that replaces this class's counts its own here."""
        return 0 if self._updater is None else self._updater.grad_steps

    @grad_update_counter.setter
    def grad_update_counter(self, count: int) -> None:
        if count or hasattr(self, "optimizer"):  # there is nothing to count before
            self.updater.grad_steps = int(count)

    def init_optimizer(self, policy: BaseAgent) -> torch.optim.Optimizer:
        """Create the optimizer. Override to use another one than AdamW; ``amago.run.param_groups.param_groups(policy, self)`` in place of
        ``policy.trainable_params`` gives it the rates of ``actor_learning_rate`` and the like, and ``l2_weights_only``."""
        return adamw(param_groups(policy, self), float(self.learning_rate), float(self.l2_coeff))

    @property
    def DEVICE(self) -> torch.device:
        """The device of the policy."""
        return self.accelerator.device

    @property
    def policy(self) -> BaseAgent:
        """The agent, without Accelerate's wrapper."""
        wrapped = self.policy_aclr
        if (
            self._unwrapped is None or self._unwrapped[0] is not wrapped
        ):  # a search through all modules, several times an update
            self._unwrapped = wrapped, self.accelerator.unwrap_model(wrapped)
        return self._unwrapped[1]

    def caster(self) -> AbstractContextManager[Any]:
        """The context of mixed precision."""
        return self.accelerator.autocast()

    def train_step(self, batch: Batch, log_step: bool) -> dict[str, float | Tensor]:
        """Forward and backward of one batch, and an update after every ``batches_per_update`` batches.

        Args:
            log_step: also compute costly metrics.

        Returns:
            the metrics of `compute_loss`, "Loss", and, with an update, those of `amago.run.update.Updater.step`.
        """
        with joint_batch(self.accelerator.num_processes), self.accelerator.accumulate(self.policy_aclr):
            with self.caster():
                metrics = self.compute_loss(batch, log_step)
            report_td_errors(batch, self.policy)
            loss = total_loss(metrics, self.policy.critic_loss_weight)
            metrics["Loss"] = loss.detach()
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                metrics |= self.updater.step(log_step, loss)
        return {k: v.detach() if isinstance(v, Tensor) and v.requires_grad else v for k, v in metrics.items()}

    def compute_loss(self, batch: Batch, log_step: bool) -> dict[str, Any]:
        """Losses of actor and critics, averaged over their masks, and metrics.

        Args:
            log_step: also compute costly metrics.

        Returns:
            "Actor Loss", "Critic Loss", "Sequence Length", "Batch Size (in Timesteps)", "Unmasked Batch Size (in
            Timesteps)", and the metrics of the agent. The update minimises the weighted sum of both losses and of
            "Auxiliary Loss", which is what an agent adds to the result of `BaseAgent.forward`; or "Loss" instead, where an agent
            or an override of this method sets it.
        """
        with self.policy.masks_edited_by(self), _outputs_of(self.policy, self.policy_aclr) as outputs:
            loss = self.policy_aclr(batch, log_step)
        metrics, terms = dict(self.policy.update_info), self.policy.loss_terms
        if terms is None or metrics.get("Actor Loss") is not terms.actor or metrics.get("Critic Loss") is not terms.critic:
            metrics["Loss"] = loss
        elif (outputs[0] if outputs else loss) is not terms.total:
            metrics["Auxiliary Loss"] = loss - terms.total
        return metrics

    def edit_actor_mask(self, batch: Batch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the actor's loss.

        Args:
            actor_loss: (B, L, G, 1).
            pad_mask: bool, of the same shape; False at padding.

        Returns:
            bool, of the same shape; True where the loss counts.
        """
        return pad_mask

    def edit_critic_mask(self, batch: Batch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the critics' loss.

        Args:
            critic_loss: (B, L, C, G, 1).
            pad_mask: bool, of the same shape; False at padding.

        Returns:
            bool, of the same shape; True where the loss counts.
        """
        return pad_mask


@contextmanager
def _outputs_of(agent: BaseAgent, wrapped: Any) -> Iterator[list[Tensor]]:
    """In the block, what the agent returns to a wrapper that returns a copy, as that of several ranks does; nothing if there is no wrapper."""
    outputs: list[Tensor] = []
    if wrapped is agent:
        yield outputs
        return
    hook = agent.register_forward_hook(lambda module, args, out: outputs.append(out))
    try:
        yield outputs
    finally:
        hook.remove()
