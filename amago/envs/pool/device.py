"""Actors on a device: one vectorised environment whose `reset` and `step` take and return tensors, or arrays of JAX.

Such an environment says so in ``metadata["arrays"]``, "torch" or "jax". Observations, rewards and actions stay on its device between
two writes: a block of steps is copied to the host at once, and a thread records it as the steps of any other environment are recorded.
This module alone of its room imports torch, and it is imported for such environments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago.data.batch import Packing
from amago.envs.amago_env import AMAGOEnv, innermost
from amago.envs.inner_env import SAME_STEP, AutoReset, autoreset_mode
from amago.envs.pool.base import ActorPlan
from amago.envs.pool.memory import Buffers, layout_of
from amago.envs.pool.sync import Actor, ActorSet, InProcessPool
from amago.envs.statistics import metric_name
from amago.hindsight import PolicyInput
from amago.spaces import ActionSpec, NonFiniteError, action_mask_key, all_finite, obs_spec
from amago.spaces.observations import leaf_spaces

Array = NDArray[Any]
Tensors = dict[str, Tensor]
BLOCK_BYTES, MOST_STEPS, FEWEST_STEPS = 2**27, 64, 4
"""A block has as many steps as fit into so many bytes, within these limits."""
_OVERRIDES = ("reset", "step", "inner_reset", "inner_step", "make_action_rep")


def dtype_of(dtype: Any) -> torch.dtype:
    """The dtype of tensors for one of NumPy."""
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def one_hot(index: Tensor, width: int) -> Tensor:
    """(B, width) float32, 1 in the columns of ``index`` (B, n)."""
    return torch.zeros((len(index), width), device=index.device).scatter_(1, index.long(), 1.0)


def converter(space: gym.Space[Any], box: gym.spaces.Box, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The conversion of a batch of observations of a leaf to rows of its flat ``box`` (`amago.spaces.obs_spec`)."""
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        counts = np.reshape(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec, -1).astype(np.int64)
        shift = torch.from_numpy(np.cumsum(counts) - counts - np.reshape(space.start, -1)).to(device)
        return lambda x: one_hot(x.reshape(len(x), -1) + shift, int(counts.sum()))
    kind = dtype_of(box.dtype)
    return lambda x: x.reshape(len(x), *box.shape).to(kind)


class TensorActions:
    """The forms of the stored actions (B, S) of a space, as tensors on a device; TypeError for a Tuple or Dict."""

    def __init__(self, spec: ActionSpec, device: torch.device):
        space = spec.space
        if spec.children:
            raise TypeError(
                f"an environment on a device has the action space {space}, but Tuple and Dict have no tensors: flatten it"
            )
        self.spec, self._shape = spec, space.shape or ()
        self._dtype = dtype_of(space.dtype)
        if isinstance(space, gym.spaces.Box):
            low, high = (
                torch.from_numpy(np.reshape(side, -1).astype(np.float64)).to(device) for side in (space.low, space.high)
            )
            self._low, self._high = low, high
        else:
            start = space.start if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete) else 0
            self._low = torch.from_numpy(np.reshape(start, -1).astype(np.int64)).to(device)

    def to_env(self, stored: Tensor) -> Tensor:
        """The environment's form (B, ...), in new memory."""
        if self.spec.kind == "continuous":
            low, high = self._low, self._high
            values = torch.clamp(low + (stored.double().clamp(-1.0, 1.0) + 1.0) * 0.5 * (high - low), low, high)
            values = values if self._dtype.is_floating_point else values.round()
        else:
            values = stored + self._low
        return values.reshape(len(stored), *self._shape).to(self._dtype)

    def to_vector(self, stored: Tensor) -> Tensor:
        """(B, A) float32, as the policy observes it."""
        parts = (
            one_hot(stored[:, p.stored], p.dim) if p.kind == "discrete" else stored[:, p.stored].float()
            for p in self.spec.parts
        )
        return torch.cat(tuple(parts), 1)


class DeviceBuffers(Buffers):
    """The arrays of a pool whose actors are on a device, as tensors there; those that only the host reads are arrays."""

    def __init__(self, layout: Any, device: torch.device):
        super().__init__(layout)
        self.device = device
        move: Any = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
        self.obs = {key: move(array) for key, array in self.obs.items()}
        for name in ("rl2s", "time_idxs", "resets", "actions"):
            setattr(self, name, move(getattr(self, name)))


class Block:
    """Steps of B rows in one piece of memory, with a copy of it on the host, which is page-locked where that is not the device.

    Args:
        first: {field: (B, ...)} of a step.
    """

    def __init__(self, first: Tensors, device: torch.device):
        packing, on_host = Packing(first), device.type == "cpu"
        self.capacity, self.t = max(FEWEST_STEPS, min(MOST_STEPS, BLOCK_BYTES // packing.nbytes)), 0
        self._memory = torch.zeros((self.capacity, packing.nbytes), dtype=torch.uint8, device=device)
        self._copy = self._memory if on_host else torch.empty_like(self._memory, device="cpu", pin_memory=device.type == "cuda")
        self._steps = [packing.views(row) for row in self._memory]
        self._on_host = [{k: v.numpy() for k, v in packing.views(row).items()} for row in self._copy]

    def next(self, fields: Iterable[str]) -> dict[str, Tensor]:
        """The memory of the next step; ValueError if its fields are not those of the first."""
        kept = self._steps[self.t]
        if differ := kept.keys() ^ set(fields):
            raise ValueError(f"step() must return the same entries of info each time, but now differ: {sorted(differ)}")
        self.t += 1
        return kept

    def start_copy(self) -> Callable[[], list[dict[str, Array]]]:
        """Begin the copy to the host; returns a function that waits for it and returns the steps, {field: (B, ...)}."""
        steps = self._on_host[: self.t]
        if self._copy is self._memory:
            return lambda: steps
        self._copy[: self.t].copy_(self._memory[: self.t], non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def arrived() -> list[dict[str, Array]]:
            done.synchronize()
            return steps

        return arrived


class DeviceActor(Actor):
    """An environment on a device, with exploration, and with a recorder that is some steps behind."""

    _buffers: Any  # DeviceBuffers, whose arrays are tensors
    _time: Any

    def __init__(self, owner: ActorSet, number: int, generation: int):
        super().__init__(owner, number, generation)
        base, self._inner = self.base, self.base.env.env
        if changed := [name for name in _OVERRIDES if getattr(type(base), name) is not getattr(AMAGOEnv, name)]:
            raise TypeError(
                f"{type(base).__name__} overrides {', '.join(changed)}, which an environment on a device does not call"
            )
        if owner.plan.extra_fields:
            raise ValueError(f"extra_fields={owner.plan.extra_fields!r} are not recorded from an environment on a device")
        if (mode := autoreset_mode(base.env)) != SAME_STEP:
            raise ValueError(
                f"{base!r} has the autoreset mode {mode!r}, but an environment on a device must reset its rows in the step that ends their "
                "rollouts, with the last observations in info['final_obs'], and say so: metadata['autoreset_mode'] = AutoresetMode.SAME_STEP"
            )
        if self.exploration is not None and not self.exploration.is_independent:
            raise TypeError(
                f"{type(self.exploration).__name__} explores in NumPy, but the environment is on a device: use EpsilonGreedy with repeat=1, "
                "BilevelEpsilonGreedy, a subclass of these that overrides current_eps, or none"
            )
        self.device, spec = device_of(self._inner), obs_spec(base.raw_observation_space, batched=True)
        if spec.space != base.observation_space:
            raise ValueError(
                f"the observation space of {base!r} was changed, but the environment on the device returns its own"
            )
        leaves = leaf_spaces(base.raw_observation_space)
        self._leaves = {k: (leaf.path, converter(leaves[k], leaf.box, self.device)) for k, leaf in spec.leaves.items()}
        self._real = [*(f"obs/{k}" for k in spec.real_keys), "rews"]  # what may be NaN
        self._actions = TensorActions(base.action_spec, self.device)
        self._mask_key = action_mask_key(base.observation_space, base.action_spec)
        self._numbers: list[Tensor] = []  # random ones of the next steps
        self._blocks: list[Block] = []  # the present one, and the one that is written
        self._thread = ThreadPoolExecutor(1, "amago-recorder")
        self._writing: Future[None] | None = None

    def attach(self, buffers: Buffers) -> None:
        self._buffers, self._time, self._resets = buffers, buffers.time_idxs[:, 0], buffers.resets
        self._any_ended = buffers.any_ended

    def _converted(self, raw: Any, prefix: str = "") -> Tensors:
        out = {}
        for key, (path, convert) in self._leaves.items():
            value = raw
            for step in path:
                value = value[step]
            out[prefix + key] = convert(as_tensor(value))
        return out

    def reset(self) -> None:
        self.settle()
        raw, info = self._inner.reset(seed=self.next_seed())
        b, rows, obs = self._buffers, self.base.batched_envs, self._converted(raw)
        for key, tensor in b.obs.items():
            tensor.copy_(obs[key])
        for tensor, value in ((b.rl2s, 0.0), (b.time_idxs, 0), (b.resets, True)):
            tensor.fill_(value)
        on_host = {k: v.cpu().numpy() for k, v in obs.items()}
        self._check_finite({f"obs/{k}": v for k, v in on_host.items()})
        self.recorder.opened(on_host, {k: v.cpu().numpy() for k, v in _logged(info, "").items()})
        if self.exploration is not None:
            self.exploration.on_rollout_start(np.ones(rows, dtype=bool))

    def step(self) -> None:
        b, rows = self._buffers, self.base.batched_envs
        action = self._explore(b.actions)
        given = self._actions.to_env(action)
        raw, *results, info = self._inner.step(given if self._inner.metadata["arrays"] == "torch" else as_jax(given))
        reward, terminated, truncated = (as_tensor(x).reshape(rows) for x in results)
        obs, last = self._converted(raw), info.get("final_obs", info.get("final_observation"))
        opened = terminated | truncated
        step = {"actions": action, "rews": reward.float(), "terminated": terminated, "truncated": truncated}
        step |= {f"obs/{k}": v for k, v in obs.items()} | ({} if last is None else self._converted(last, "last/"))
        step |= _logged(info, "info/") | _logged(info.get("final_info") or {}, "final/")
        if not self._blocks:
            self._blocks = [Block(step, self.device) for _ in range(2)]
        kept = self._blocks[0].next(step)
        torch._foreach_copy_(
            [*kept.values(), *b.obs.values(), b.resets], [*(step[k] for k in kept), *(obs[k] for k in b.obs), opened]
        )
        b.rl2s.copy_(torch.cat((step["rews"][:, None], self._actions.to_vector(action)), 1).masked_fill_(opened[:, None], 0.0))
        b.time_idxs.add_(1).masked_fill_(opened[:, None], 0)
        self.outcome = (step["rews"], terminated, truncated, {})
        if self.exploration is not None and self.exploration.randomize_eps:  # type: ignore[attr-defined]
            e: Any = self.exploration
            e.global_multiplier = torch.where(opened, self._drawn[:, 0], e.global_multiplier)
        if self._blocks[0].t == self._blocks[0].capacity:
            self._write()

    def _explore(self, action: Tensor) -> Tensor:
        """The stored actions to take instead of the policy's: `amago.envs.exploration.random_part` and `made_legal`, with tensors."""
        e: Any = self.exploration
        if e is None:
            return action
        if not isinstance(e.global_multiplier, Tensor):  # of a checkpoint, or before the first step
            e.global_multiplier = torch.as_tensor(e.global_multiplier, dtype=torch.float32, device=self.device)
        if not self._numbers:
            self._draw(e.rng)
        eps, self._drawn, noisy, at = e.current_eps(self._time)[:, None], self._numbers.pop(), action.clone(), 1
        for p in self.base.action_spec.parts:
            width = 2 if p.kind == "discrete" else p.dim
            noisy[:, p.stored] = self._random(p, action[:, p.stored], eps, self._drawn[:, at : at + width])
            at += width
        e.global_step += 1
        return noisy

    def _draw(self, rng: np.random.Generator) -> None:
        """Random numbers for some steps: the host draws them, as in other modes, and they arrive in one copy."""
        rows, columns = (MOST_STEPS, len(self._time)), [rng.random((MOST_STEPS, len(self._time), 1), np.float32)]
        for p in self.base.action_spec.parts:
            draw: Any = rng.standard_normal if p.kind == "continuous" else rng.random
            columns.append(draw((*rows, 2 if p.kind == "discrete" else p.dim), np.float32))
        numbers = torch.from_numpy(np.concatenate(columns, 2))
        numbers = numbers.pin_memory() if self.device.type == "cuda" else numbers
        self._numbers = list(numbers.to(self.device, non_blocking=True).unbind(0))

    def _random(self, part: Any, action: Tensor, eps: Tensor, numbers: Tensor) -> Tensor:
        if part.kind == "continuous":
            return (action + eps * numbers).clamp(-1.0, 1.0)
        legal = None
        if self._mask_key is not None:
            legal = (self._buffers.obs[self._mask_key].reshape(len(action), -1) != 0)[:, part.vector]
        if part.kind == "multibinary":
            flipped = torch.where(numbers < eps, 1 - action, action)
            return flipped if legal is None else flipped * legal
        if legal is None:
            drawn = (numbers[:, 1:] * part.dim).long().clamp_(max=part.dim - 1)
        else:
            counts = legal.long().cumsum(1)
            wanted = (numbers[:, 1:] * counts[:, -1:]).long().minimum(counts[:, -1:] - 1)  # legal choices before the drawn one
            drawn = (counts <= wanted).sum(1, keepdim=True).clamp(max=part.dim - 1)
        return torch.where(numbers[:, :1] < eps, drawn, action)

    def _write(self) -> None:
        """Let the thread record the present block, and go on with the other, once that is recorded."""
        arrived, before, self._writing = self._blocks[0].start_copy(), self._writing, None
        if before is not None:
            before.result()
        self._writing = self._thread.submit(self._record, arrived)
        self._blocks.reverse()
        self._blocks[0].t = 0

    def settle(self) -> None:
        """Record all steps taken, and let the host see the state of exploration."""
        if self._blocks and self._blocks[0].t:
            self._write()
        self._numbers = []  # so that what follows depends on the state of the generator alone
        before, self._writing = self._writing, None
        if before is not None:
            before.result()
        e: Any = self.exploration
        if e is not None and isinstance(e.global_multiplier, Tensor):
            self.base.step_count = self._time.cpu().numpy()
            e.global_multiplier = e.global_multiplier.cpu().numpy().astype(np.float64)

    def _record(self, arrived: Callable[[], list[dict[str, Array]]]) -> None:
        everywhere = np.ones(self.base.batched_envs, dtype=bool)
        for step in arrived():
            self._check_finite(step)

            def part(prefix: str, step: dict[str, Array] = step) -> dict[str, Array]:
                return {name[len(prefix) :]: array for name, array in step.items() if name.startswith(prefix)}

            ended = step["terminated"] | step["truncated"]
            infos = [part("info/"), part("final/")]
            for info in infos:
                info |= {f"_{key}": everywhere for key in info}
            auto = AutoReset(everywhere, ended, None, everywhere, [(infos[0], everywhere)], [(infos[0], ended)])
            if ended.any():
                last = part("last/")
                auto.last_obs, auto.last_known = last or part("obs/"), everywhere if last else ~ended
                auto.step_infos, auto.tells_apart = [(infos[0], ~ended), (infos[1], ended)], bool(infos[1])
            self._any_ended[0] |= ended.any()
            self.base.auto, self.base.stored_action = auto, step["actions"]
            self.recorder.stepped(part("obs/"), step["rews"], step["terminated"], step["truncated"], infos[0])

    def _check_finite(self, found: dict[str, Array]) -> None:
        for name in self._real:
            if name in found and not all_finite(found[name]):
                row = int(np.argwhere(~np.isfinite(found[name]))[0][0])
                what = "the reward" if name == "rews" else f"observation {name[4:]!r}"
                raise NonFiniteError(
                    f"{self.base.env_name} (row {row}): {what} is NaN or infinite, but must be finite in float32"
                )

    def policy_input(self) -> PolicyInput:
        b = self._buffers
        return (
            {k: v.cpu().numpy().copy() for k, v in b.obs.items()},
            b.rl2s.cpu().numpy().copy(),
            b.time_idxs.cpu().numpy().copy(),
        )

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


def _logged(info: dict[str, Any], prefix: str) -> Tensors:
    return {prefix + key: as_tensor(value) for key, value in info.items() if metric_name(key) is not None}


def as_tensor(array: Any) -> Tensor:
    """A tensor in the memory of an array of JAX, or the tensor itself."""
    return array if isinstance(array, Tensor) else torch.from_dlpack(array)


def as_jax(tensor: Tensor) -> Any:
    """An array of JAX in the memory of a tensor; indices as int32, since JAX has no int64 by default."""
    import jax

    return jax.dlpack.from_dlpack(tensor.int() if tensor.dtype == torch.int64 else tensor)


def device_of(env: Any) -> torch.device:
    """The device of an environment's arrays, from its attribute ``device`` (of JAX: "cpu", "gpu", or a device)."""
    found = getattr(env, "device", None)
    if env.metadata["arrays"] == "torch":
        if found is None:
            raise TypeError(f"{env!r} returns tensors, so it must have an attribute `device`, where they are")
        return torch.device(found)
    import jax

    platform = (jax.devices(found)[0] if found is None or isinstance(found, str) else found).platform
    return torch.device("cuda" if platform in ("gpu", "cuda") else platform)


class DevicePool(InProcessPool):
    """One environment on a device: `obs`, `rl2s`, `time_idxs` and `resets` are tensors there, and so may be actions."""

    actor_type = DeviceActor

    def _make_buffers(self, plan: ActorPlan) -> Buffers:
        layout = layout_of(self.num_actors, self.observation_space, self.action_spec, 1)
        return DeviceBuffers(layout, device_of(innermost(self.envs[0].env, "").env.env))

    def send(self, group: int | None, actions: Any) -> None:
        tensor: Any = actions if isinstance(actions, Tensor) else torch.from_numpy(np.asarray(actions))
        super().send(group, tensor)

    def _ask(self, method: str, *args: object) -> list[Any]:
        self._actors.settle()
        return super()._ask(method, *args)
