"""The learner: agent, optimizer and schedule, groups of parameters, updates, and the average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, extract_model_from_parallel
from torch import Tensor
from torch.optim import Optimizer

from amago import ops
from amago.agent import BaseAgent
from amago.data.batch import Batch
from amago.nets import ranks
from amago.run.checkpoint import CheckpointError
from amago.run.collect import Spaces
from amago.run.compiling import CompiledLoss, Update, UpdateGraphs, can_compile, on_a_side_stream
from amago.run.group import TIMEOUT, Ranks, leave_at_exit, ranks_on_cpus
from amago.run.optimizer import load_optimizer, load_schedule, lr_schedule, names_in, rates_of_parts, skips_by_itself
from amago.run.optimizer import param_groups as param_groups
from amago.run.record import Calls, recording
from amago.run.settings import ExperimentSettings, SettingsError


class WeightAverage:
    """An exponential moving average over updates of the parameters that an agent trains (Polyak averaging).

    A policy that follows a value function over many updates wavers around a good one; its average does not. Only the policy
    that acts is averaged: updates go on from the trained weights. Target networks and buffers are left alone.

    Args:
        agent: the average begins with its present weights.
        decay: of the average at each update, in (0, 1). The first updates have a smaller one, (1 + n) / (10 + n) after n of them, so that
            untrained weights are soon forgotten.
    """

    def __init__(self, agent: BaseAgent, decay: float):
        trained = {id(p) for p in agent.trainable_params}
        self.decay, self.agent = decay, agent
        self._parameters = {name: p for name, p in agent.named_parameters() if id(p) in trained}
        self._kept: list[Tensor] | None = None  # the trained weights, while the average acts
        self.restart()

    def restart(self) -> None:
        """Begin with the present weights, for example after others were loaded."""
        growth = self.agent.scale_growth
        self._mean, self._growth = self._present(), None if growth is None else growth.clone()
        if self._kept is not None:
            self._kept = self._present()

    def share(self, updates: int) -> float:
        """The share of the present weights in the average, when so many updates have led to them, from 1."""
        return 1.0 - min(self.decay, (1 + updates) / (10 + updates))

    @torch.no_grad()
    def update(self, share: float | Tensor) -> None:
        """Include the present weights with this share, and with ``moves`` of the agent."""
        self._divide()
        moves = self.agent.moves
        ops.lerp_(self._mean, list(self._parameters.values()), share if moves is None else share * moves)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """In the block, the agent's parameters hold the average; a block within another one changes nothing."""
        if self._kept is not None:
            yield
            return
        self._kept = self._present()
        self._divide()
        self._put(self._mean)
        try:
            yield
        finally:
            self._put(self._kept)
            self._kept = None

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights, by name."""
        return dict(zip(self._parameters, self._present() if self._kept is None else self._kept))

    def _present(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters.values()]

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        torch._foreach_copy_(list(self._parameters.values()), weights)

    @torch.no_grad()
    def _divide(self) -> None:
        """Repeat the divisions that the agent has made since the last call, so that the average's values of actions stay the same."""
        growth = self.agent.scale_growth
        if growth is None or self._growth is None:
            return
        divided = {id(p) for p in self.agent.divided_parameters()}
        for mean, p in zip(self._mean, self._parameters.values()):
            if id(p) in divided:
                mean.mul_(self._growth / growth)
        self._growth.copy_(growth)


# ---- updates --------------------------------------------------------------------------------------------------------------

MAX_SKIPPED_IN_A_ROW = 20
_SKIPPED = "1 if this update was skipped"  # a metric of a captured update, which the host counts after a replay


class NonFiniteTraining(RuntimeError):
    """Losses or gradients were not finite in `MAX_SKIPPED_IN_A_ROW` consecutive updates."""


def report_td_errors(batch: Batch, agent: BaseAgent) -> None:
    """Pass the TD errors of a batch with ``sources`` to the datasets that draw by priority, after its losses."""
    errors, agent.td_errors = agent.td_errors, None
    if errors is None:
        raise SettingsError(
            f"sampling='priority' needs TD errors, but {type(agent).__name__} computes none: its losses set td_errors, (B, L, 1), "
            "where critics are trained; set online_coeff above 0 or fake_filter=False, or sampling to 'uniform'"
        )
    mask = agent.loss_mask(batch) & ~errors.isnan()
    kept = torch.where(mask, errors.detach().float(), 0.0)[..., 0]
    mean = kept.sum(1) / mask.sum((1, 2)).clamp(min=1)
    nothing = ~mask.any(1)[:, 0]  # was trained on
    both = torch.stack((kept.amax(1), mean)).masked_fill(nothing, torch.nan).cpu().numpy()  # one copy from the device
    owners: dict[int, tuple[Any, list[int]]] = {}
    for i, source in enumerate(batch.sources or ()):
        if source is not None:
            owners.setdefault(id(source.owner), (source.owner, []))[1].append(i)
    for owner, rows in owners.values():
        owner.report([batch.sources[i] for i in rows], both[0, rows], both[1, rows])


class Learner:
    """Model, optimizer and updates.

    Where several ranks train together, an update equals one process's update with the batches of all (`amago.nets.ranks`).

    Args:
        settings: of the run; their present values count.

    Attributes:
        policy_aclr: the agent in Accelerate's wrapper, or any module that acts (`amago.compat.parts`), set by `use`; None before it is built.
        policy: the agent, without the wrapper.
        optimizer, lr_schedule: of the agent; None in a process that only collects.
        average: of the weights, or None; made at the first update.
        calls: the configurables that were called to build the agent.
    """

    def __init__(self, settings: ExperimentSettings) -> None:
        self.settings = settings
        self.policy_aclr: Any = None
        self.policy: Any = None
        self.optimizer: Any = None
        self.lr_schedule: Any = None
        self.average: WeightAverage | None = None
        self.calls: Calls | None = None
        self._grad_steps = self._skipped = self._in_a_row = 0
        self._compiled: CompiledLoss | None = None
        self._graphs: UpdateGraphs | None = None  # of the present weights' memory
        # on the device, for graphs: learning rates, and the share of the weights in their average
        self._numbers: list[Tensor] = []
        self._outcome: tuple[Tensor, torch.cuda.Event] | None = None  # of the last update on a GPU: 1 if it was skipped
        self._made: tuple[Accelerator, int, str] | None = None  # an accelerator, and the settings for which it was made here
        self._trained: tuple[Any, list[Tensor]] = (None, [])  # an agent, and its parameters

    @cached_property
    def accelerator(self) -> Accelerator:
        """Device, precision and processes. It is made on first use; set it to use another."""
        s = self.settings
        AcceleratorState._reset_state()  # otherwise an earlier experiment of this process decides the precision
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True), InitProcessGroupKwargs(timeout=TIMEOUT)]
        made = Accelerator(
            gradient_accumulation_steps=s.batches_per_update, mixed_precision=s.mixed_precision, cpu=ranks_on_cpus(),
            kwargs_handlers=handlers,
        )  # fmt: skip
        self._made = made, s.batches_per_update, s.mixed_precision
        if made.num_processes > 1:
            leave_at_exit()
        return made

    def renew_accelerator(self) -> None:
        """Make another accelerator if the settings have changed since this one was made here."""
        now, made, wanted = self.accelerator, self._made, (self.settings.batches_per_update, self.settings.mixed_precision)
        if made is not None and made[0] is now and (made[1:] != wanted or now.mixed_precision != wanted[1]):
            del self.accelerator

    def use(self, wrapped: Any) -> None:
        """Act with a module, and train it if it is an agent."""
        # `extract_model_from_parallel` imports PyTorch's compiler, which takes a second
        agent = wrapped if isinstance(wrapped, BaseAgent) else extract_model_from_parallel(wrapped)
        self.policy_aclr, self.policy, self._graphs = wrapped, agent, None

    def build(self, spaces: Spaces, make_optimizer: Callable[[BaseAgent], Optimizer] | None) -> None:
        """Build the agent, its optimizer and schedule (neither if ``make_optimizer`` is None: this process never trains).

        Raises:
            SettingsError: learning rates of parts are set, and the optimizer was not built from `param_groups`.
        """
        s = self.settings
        agent_type: Any = s.agent_type  # `resolve` has replaced names by classes
        parts: dict[str, Any] = {"tstep_encoder_type": s.tstep_encoder_type, "traj_encoder_type": s.traj_encoder_type}
        with recording() as self.calls:
            agent = agent_type(
                obs_space=spaces.observation, rl2_space=spaces.rl2, action_space=spaces.action, max_seq_len=s.max_seq_len, **parts
            ).to(self.accelerator.device)  # fmt: skip
        if s.critic_loss_weight is not None:
            agent.critic_loss_weight = float(s.critic_loss_weight)
        if make_optimizer is None:
            self.use(self.accelerator.prepare_model(agent, evaluation_mode=True))
            return
        optimizer = make_optimizer(agent)
        if (ignored := sorted(rates_of_parts(s))) and not any("name" in group for group in optimizer.param_groups):
            raise SettingsError(
                f"init_optimizer of {type(s).__name__} does not use {', '.join(ignored)}: build its optimizer from "
                "amago.run.learner.param_groups(policy, self) in place of policy.trainable_params, or leave these out"
            )
        wrapped, self.optimizer = self.accelerator.prepare(agent, optimizer)
        self.use(wrapped)
        learning_epochs = max(0, s.epochs - int(min(s.start_learning_at_epoch, s.epochs)))
        updates = learning_epochs * s.train_batches_per_epoch // s.batches_per_update
        self.lr_schedule = lr_schedule(self.optimizer, s.lr_warmup_steps, updates, s.lr_cooldown)
        if s.compile is True or (s.compile and not self.why_eager):
            ranks_of_run = self.accelerator.num_processes
            self._compiled = CompiledLoss(self._loss_beside_parts, self.policy, s.max_seq_len, ranks_of_run)
        self.accelerator.register_for_checkpointing(self.lr_schedule)  # for those who call accelerator.save_state()

    @property
    def why_eager(self) -> str:
        """The reason why losses are not compiled with ``compile="auto"``; "" if they are."""
        return "several processes" if self.accelerator.num_processes > 1 else can_compile(self.accelerator.device)

    def describe_computation(self) -> str:
        """How updates are computed; "" where that is usual: in float32 on a CPU."""
        s, on_gpu, parts = self.settings, self.accelerator.device.type == "cuda", []
        if on_gpu and s.matmul_precision != "highest":
            parts.append(f"float32 products in TF32 (matmul_precision={s.matmul_precision!r})")
        if self._compiled is not None:
            parts.append("losses compiled at the first updates")
        elif on_gpu:
            parts.append(f"losses not compiled ({self.why_eager or 'compile=False'})")
        if on_gpu and s.cuda_graphs:
            parts.append("updates and steps of the policy replayed as CUDA graphs")
        elif on_gpu:
            parts.append("kernels started one by one (cuda_graphs=True replays whole updates)")
        return ", ".join(parts)

    def begin_training(self, from_records: bool) -> str:
        """Begin a training phase, of data that was not collected for this run if ``from_records``; returns a line about changes of the agent."""
        self.policy_aclr.train()
        changed = self.policy.learn_from_records() if from_records else ""
        if changed:
            self._graphs = None
        return changed

    def acting_weights(self) -> AbstractContextManager[Any]:
        """In the block, the policy has the weights with which it acts: with ``ema_decay``, their average."""
        return nullcontext() if self.average is None else self.average.acting()

    def restart_average(self) -> None:
        """Begin the average, if there is one, with the present weights: others were loaded."""
        self._graphs = None
        if self.average is not None:
            self.average.restart()

    def _renew_average(self) -> None:
        """Make the average, unless there is one of this policy."""
        known, decay = self.average, self.settings.ema_decay
        if not decay:
            self.average = None
        elif known is None or known.agent is not self.policy or known.decay != decay:
            self.average = WeightAverage(self.policy, decay)

    def loss_of(self, batch: Batch, log_step: bool, masks: object) -> dict[str, Any]:
        """Losses and metrics, as from `amago.Experiment.compute_loss`; ``masks`` has ``edit_actor_mask`` and ``edit_critic_mask``."""
        with self.policy.masks_edited_by(masks):
            rest = (self._loss_beside_parts if self._compiled is None else self._compiled)(batch, log_step)
        return {**self.policy.update_info, "Auxiliary Loss": rest}  # so that each of the terms may be changed

    def _loss_beside_parts(self, batch: Batch, log_step: bool) -> Tensor:
        """The loss without `_sum_of_parts` of the metrics, which the policy has after the call."""
        return self.policy_aclr(batch, log_step) - self._sum_of_parts(self.policy.update_info)  # type: ignore[no-any-return]

    def _sum_of_parts(self, metrics: Mapping[str, Any]) -> Any:
        return metrics.get("Actor Loss", 0.0) + self.policy.critic_loss_weight * metrics.get("Critic Loss", 0.0)

    def train(self, update: Update, batch: Batch, log_step: bool) -> dict[str, Any]:
        """``update(batch)``, which ends with `step`: by a CUDA graph, if the update can be one."""
        s = self.settings
        optimizer = self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer
        if not skips_by_itself(optimizer) or s.batches_per_update > 1 or self.accelerator.num_processes > 1:
            return update(batch)
        if log_step or batch.sources is not None:
            return on_a_side_stream(update, batch)
        self._settle()
        self._renew_average()
        self._fill_numbers(optimizer)
        if self._graphs is None:
            self._graphs = UpdateGraphs(s.max_seq_len, self.optimizer.zero_grad)
        metrics = self._graphs(update, batch)
        if (skipped := metrics.pop(_SKIPPED, None)) is not None:
            metrics |= self._counts()
            self._note(skipped)
        return metrics

    def step(self, batch: Batch, metrics: dict[str, Any], log_step: bool) -> dict[str, float | Tensor]:
        """Backward with the ``metrics`` of `loss_of`, and an update if ``batches_per_update`` batches are complete."""
        if batch.sources is not None:
            report_td_errors(batch, self.policy)
        other, loss = metrics.pop("Auxiliary Loss", 0.0), metrics.get("Loss")
        if loss is None:
            loss = self._sum_of_parts(metrics) + other
        metrics["Loss"] = loss.detach()
        self.accelerator.backward(ranks.shared_if_not_finite(loss))
        if self.accelerator.sync_gradients:
            metrics |= self.update(log_step, loss)
        # without the graph: a compiled loss replaces it at its end only, and would go on with nodes of this update
        info = self.policy.update_info
        info.update({k: v.detach() for k, v in info.items() if isinstance(v, Tensor)})
        return {k: v.detach() if isinstance(v, Tensor) and v.requires_grad else v for k, v in metrics.items()}

    def update(self, log_step: bool, loss: Tensor | None = None) -> dict[str, float | Tensor]:
        """Update with the gradients in ``.grad``, and clear them: clip their norm, step optimizer and schedule, and update the target
        networks and the average. If the loss or a gradient is not finite, parameters stay as they are.

        Args:
            log_step: also return the gradient norms of encoders, actor and critics.
            loss: the loss of these gradients; over several ranks, of `amago.nets.ranks.shared_if_not_finite`, so that all skip, or none.

        Returns:
            "Gradient Norm" (before clipping), "Learning Rate" and "Skipped Updates".

        Raises:
            NonFiniteTraining: this is the 20th skipped update in a row.
        """
        if self.average is not None or self.settings.ema_decay:
            self._renew_average()
        if self._trained[0] is not self.policy:
            self._trained = self.policy, list(self.policy.trainable_params)
        metrics: dict[str, float | Tensor] = {}
        scaler = self.accelerator.scaler
        if log_step:
            scale = 1.0 if scaler is None else scaler.get_scale()  # float16: gradients are still multiplied by it
            metrics |= {name: norm / scale for name, norm in self.policy.get_grad_norms().items()}
        norm: Any = self.accelerator.clip_grad_norm_(self._trained[1], self.settings.grad_clip)
        checked = norm if loss is None else norm + loss.detach()
        optimizer = self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer
        if skips_by_itself(optimizer):
            skipped = (checked * 0.0).ne(0.0).float()  # NaN is not 0: half the kernels of isfinite
            if torch.cuda.is_current_stream_capturing():
                self._step_on_gpu(optimizer, skipped)
                metrics[_SKIPPED] = skipped
            else:
                self._settle()
                self._fill_numbers(optimizer)
                self._step_on_gpu(optimizer, skipped)
                self._note(skipped)
                if log_step:
                    self._settle()
        elif checked.isfinite():
            self.optimizer.step()
            self._count(skipped=False)
            self._follow()
        else:
            if scaler is not None:
                scaler.update()  # float16: lowers its scale where it found infinite gradients
            self._count(skipped=True)
        self.optimizer.zero_grad(set_to_none=True)
        return metrics | {"Gradient Norm": norm.detach()} | self._counts()

    def _counts(self) -> dict[str, float]:
        return {"Learning Rate": self.lr_schedule.get_last_lr()[0], "Skipped Updates": float(self._skipped)}

    def _step_on_gpu(self, optimizer: Any, skipped: Tensor) -> None:
        """Step, or skip, without a wait for the GPU, which alone knows if ``skipped`` () is 1 or 0."""
        scaler, groups = self.accelerator.scaler, optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, number in zip(groups, self._numbers):
            group["lr"] = number
        optimizer.found_inf = skipped
        try:
            if scaler is not None:  # float16: gradients are clipped, and no longer multiplied by the scale
                self.optimizer.scaler = None
            self.optimizer.step()
        finally:
            if scaler is not None:
                self.optimizer.scaler = scaler
                scaler.update()
            del optimizer.found_inf
            for group, rate in zip(groups, rates):
                group["lr"] = rate
        self.policy.moves = 1.0 - skipped
        self._follow(self._numbers[-1] if self._numbers else None, ahead=1)
        self.policy.moves = None

    def _fill_numbers(self, optimizer: Any) -> None:
        """With ``cuda_graphs``, write the numbers of the next update to the device, where graphs read them."""
        if not self.settings.cuda_graphs:
            self._numbers = []
        else:
            share = 0.0 if self.average is None else self.average.share(self._grad_steps + 1)
            numbers = [*(float(group["lr"]) for group in optimizer.param_groups), share]
            if not self._numbers:
                self._numbers = [torch.zeros((), device=self.accelerator.device) for _ in numbers]
            for to, number in zip(self._numbers, numbers):
                to.fill_(number)

    def _note(self, skipped: Tensor) -> None:
        """Remember that the last update is to be counted when the next one is ready to step (`_settle`)."""
        self._outcome = skipped.to("cpu", non_blocking=True), torch.cuda.Event()
        self._outcome[1].record()

    def _follow(self, share: Tensor | None = None, ahead: int = 0) -> None:
        """Let target networks and average follow the weights; ``ahead`` of the updates are not counted yet. The weights have this share in the
        average; None: `WeightAverage.share`."""
        self.policy.soft_sync_targets()
        if self.average is not None:
            self.average.update(self.average.share(self._grad_steps + ahead) if share is None else share)

    def _settle(self) -> None:
        """Count the last update on a GPU, if it is not counted yet."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            if not outcome[1].query():
                outcome[1].synchronize()
            self._count(bool(outcome[0]))

    def _count(self, skipped: bool) -> None:
        if not skipped:
            self._in_a_row = 0
            self._grad_steps += 1
            self.lr_schedule.step()
            return
        self._skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteTraining(
                f"the loss or its gradient was not finite {self._in_a_row} steps in a row; parameters are as they were before. "
                "Look for NaN or huge values in observations and rewards, or lower learning_rate or reward_multiplier."
            )

    @property
    def grad_steps(self) -> int:
        """Updates so far, without skipped ones. A program that makes updates itself counts them here."""
        self._settle()
        return self._grad_steps

    @grad_steps.setter
    def grad_steps(self, count: int) -> None:
        self._settle()
        self._grad_steps = count

    @property
    def skipped(self) -> int:
        """Updates that were skipped, because a loss or a gradient was not finite."""
        self._settle()
        return self._skipped

    # ---- training state ---------------------------------------------------------------------------------------------------

    def average_gradients(self, group: Ranks) -> None:
        """Set the gradients of an incomplete update of several batches to their means over the ranks, as the end of the update
        would do, so that rank 0 can save them for all."""
        if group.count > 1:
            parameters, found = dict(self.policy.named_parameters()), self._unused_gradients()
            for name in sorted(set().union(*group.gather([list(found)]))):
                if name not in found:
                    found[name] = parameters[name].grad = torch.zeros_like(parameters[name])
                group.average([found[name]])

    def _unused_gradients(self) -> dict[str, Tensor]:
        if self.accelerator.step % self.settings.batches_per_update == 0:
            return {}
        return {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The learner's entries in a training state, (as JSON types, tensors), but for the weights of the policy."""
        self._settle()
        state = {
            "updater": {"grad_steps": self.grad_steps, "skipped": self.skipped, "in_a_row": self._in_a_row}, "schedule": self.lr_schedule.state_dict(),
            "batches_in_update": self.accelerator.step % self.settings.batches_per_update,
            "optimizer_parameters": names_in(self.optimizer, self.policy),
        }  # fmt: skip
        tensors = {"optimizer": self.optimizer.state_dict(), "gradients": self._unused_gradients()}
        self._renew_average()
        if self.average is not None:
            tensors["trained"] = self.average.state_dict()
        if self.accelerator.scaler is not None:
            tensors["scaler"] = self.accelerator.scaler.state_dict()
        return state, tensors

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Any], same_update: bool) -> None:
        """Restore the result of `state_dict`, after the weights of the policy; the present settings of optimizer and schedule remain.
        An update that was begun goes on (``same_update``) or begins anew."""
        self._renew_average()
        self.restart_average()  # with the weights that act
        own = self.policy.state_dict()
        for name, weight in tensors.get("trained", {}).items():
            if name not in own:
                raise CheckpointError(f"the agent has no {name}, whose trained weight was saved beside its average")
            own[name].copy_(weight)
        gradients = tensors["gradients"] if same_update else {}
        for name, p in self.policy.named_parameters():
            p.grad = gradients[name].to(p.device) if name in gradients else None
        load_optimizer(self.optimizer, tensors["optimizer"], state["optimizer_parameters"], self.policy)
        load_schedule(self.lr_schedule, state["schedule"], self.optimizer)
        if self.accelerator.scaler is not None and "scaler" in tensors:
            self.accelerator.scaler.load_state_dict(tensors["scaler"])
        counters = state["updater"]
        self._outcome = self._graphs = None
        self._grad_steps, self._skipped, self._in_a_row = counters["grad_steps"], counters["skipped"], counters["in_a_row"]
        self.accelerator.step = state["batches_in_update"] if same_update else 0
