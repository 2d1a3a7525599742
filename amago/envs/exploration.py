"""Exploration: noise added to the policy's actions, as wrappers around an `AMAGOEnv`.

Each actor has its own wrapper and random generator. Schedules count the steps of one actor and are saved in checkpoints
(`ExplorationWrapper.state_dict`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.timesteps import Timestep
from amago.envs import behaviour
from amago.envs.environment import Step
from amago.envs.forwarding import assignable
from amago.envs.held_noise import HeldNoise
from amago.envs.legal import made_legal
from amago.envs.wrapper import AMAGOWrapper
from amago.registry import Registry
from amago.spaces import action_mask_key

Array = NDArray[Any]

EXPLORATION: Registry[type[ExplorationWrapper]] = Registry("exploration")
"""The exploration strategy of each name."""
register_exploration = EXPLORATION.register
get_exploration_cls = EXPLORATION.find
list_registered_explorations = EXPLORATION.names


class ExplorationWrapper(AMAGOWrapper, gym.ActionWrapper[Any, Any, Any]):
    """Base class of exploration: subclass it and override `add_exploration_noise`.

    If an `amago.spaces.ActionMask` is bound, illegal actions after the noise are replaced: an illegal choice by one drawn uniformly from
    the legal ones, and bits that may not be 1 by 0.

    Args:
        amago_env: the environment to wrap.

    Attributes:
        rng: the generator from which to draw all randomness; each actor's has its own seed.
        global_step: steps that this actor has taken over all rollouts.

    Raises:
        TypeError: ``amago_env`` is not an `AMAGOEnv`.
        ValueError: the mask does not fit its spaces.
    """

    def __init__(self, amago_env: Any):
        super().__init__(amago_env)
        self._mask_key = action_mask_key(self.amago_env.observation_space, self.action_spec)
        self._mask: Array | None = None  # of the next action, (B, ...)
        self.rng = np.random.default_rng()
        self.global_step = 0
        self._noise = _noise_of(self)
        self.behaviour: behaviour.BehaviourLog | None = None  # where the probabilities of actions are recorded

    @assignable
    def local_step(self) -> NDArray[np.int64]:
        """(B,) index of the next action in its rollout."""
        return self.amago_env.step_count

    def add_exploration_noise(self, action: Array, local_step: NDArray[np.int64]) -> Array:
        """Return the actions to take instead of the policy's.

        Args:
            action: (B, S) in stored form (`amago.spaces`); do not change it in place.
            local_step: (B,) index of each action in its rollout. ``self.amago_env.horizon`` is the most steps of a rollout, if known.

        Returns:
            (B, S), of the same dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} must override add_exploration_noise(action, local_step)")

    def action_probabilities(self, probabilities: Array, local_step: NDArray[np.int64]) -> Array:
        """The probabilities of the actions that `add_exploration_noise` returns; called before it, if they are recorded.

        Override it beside `add_exploration_noise` for the extra field "behaviour_log_prob". Illegal actions are replaced afterwards.

        Args:
            probabilities: (B, A) of the policy: of each choice, and of each bit being 1.
            local_step: (B,) index of each action in its rollout.

        Returns:
            (B, A), given the state of the noise before this step. Parts and bits of an action are independent.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how likely each action is after its noise")

    def on_rollout_start(self, opened: NDArray[np.bool_]) -> None:
        """Called when new rollouts begin in the rows where ``opened`` (B,) is True; the default does nothing."""

    def exploration_metrics(self) -> dict[str, float]:
        """Numbers about the present exploration, to be logged at the end of each collection phase as means over actors; default: none."""
        return {}

    def seed(self, seed: int | np.random.SeedSequence | None) -> None:
        """Replace the random generator; call it before `reset`."""
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Timestep, dict[str, Any]]:
        out = self.env.reset(seed=seed, options=options)
        if self._mask_key is not None:
            self._mask = out[0].obs[self._mask_key]
        self.on_rollout_start(np.ones(self.batched_envs, dtype=bool))
        return out

    def action(self, action: Array) -> Array:
        """The action to take instead of the policy's.

        Args:
            action: (B, S), or (S,) of one environment.

        Returns:
            the same shape.
        """
        if action.ndim == 2:
            noisy = self._noise(action, self.amago_env.step_count)
            return noisy if self._mask is None else made_legal(self.action_spec, noisy, self._mask, self.rng)
        batch = action[None]
        noisy = self._noise(batch, self.amago_env.step_count)
        if self._mask is not None:
            noisy = made_legal(self.action_spec, noisy, self._mask, self.rng)
        return action if noisy is batch else noisy[0]

    def step(self, action: Any) -> Step:  # type: ignore[override]  # arrays: rows side by side
        action = self.amago_env.check_action(action)  # before the noise, whose clipping would hide an action out of bounds
        action = self.action(action) if self.behaviour is None else self.behaviour.explored(self, action, self._mask)
        self.global_step += 1
        out: Any = self.env.step(action)
        if self._mask_key is not None:
            self._mask = out[0].obs[self._mask_key]
        auto = self.amago_env.auto
        if auto is not None and auto.opened.any():
            self.on_rollout_start(auto.opened)
        return out  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Schedule and random state, JSON-able. A subclass's ``rng`` that is no `numpy.random.Generator` is left out."""
        generator = self.rng.bit_generator.state if isinstance(self.rng, np.random.Generator) else None
        return {"global_step": self.global_step, "rng": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore schedule and random state from `state_dict`; rollouts in progress are not part of it.

        Raises:
            KeyError: an entry is missing.
        """
        self.global_step = int(state["global_step"])
        if state["rng"] is not None and isinstance(self.rng, np.random.Generator):
            self.rng.bit_generator.state = state["rng"]


def _noise_of(wrapper: ExplorationWrapper) -> Callable[[Array, NDArray[np.int64]], Array]:
    """The hook of a wrapper as a function of two arguments.

    Hooks written for amago 0.1 take the rollout's horizon, too.

    Raises:
        TypeError: the hook takes another number of arguments.
    """
    hook: Callable[..., Array] = wrapper.add_exploration_noise
    parameters = inspect.signature(hook).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    if needed == 3:
        horizon = wrapper.amago_env.horizon
        return lambda action, local_step: hook(action, local_step, horizon)
    if needed > 2 or (len(positional) < 2 and not any(p.kind == p.VAR_POSITIONAL for p in parameters)):
        raise TypeError(
            f"{type(wrapper).__name__}.add_exploration_noise{inspect.signature(hook)} must take (action, local_step): actions (B, S) "
            "and the index (B,) of each in its rollout"
        )
    return hook


Repeat = float | tuple[float, float]
"""Steps that a random choice is held on average, or the range from which that is drawn."""


def _checked_repeat(repeat: Any) -> Repeat:
    """``repeat`` with a pair as a tuple.

    Raises:
        ValueError: it is neither a number of steps, 1 or more, nor a pair of them in order.
    """
    pair = tuple(float(x) for x in repeat) if isinstance(repeat, (tuple, list)) else None
    if not (1.0 <= repeat < np.inf if pair is None else len(pair) == 2 and 1.0 <= pair[0] <= pair[1] < np.inf):
        raise ValueError(f"repeat is {repeat!r}, but must be a number of steps, 1 or more, or a pair (low, high) of them")
    return float(repeat) if pair is None else (pair[0], pair[1])


class _AnnealedNoise(ExplorationWrapper):
    """Random actions with probability epsilon: a subclass's `schedule`, times a factor drawn for each rollout.

    Attributes:
        global_multiplier: (B,) the factor of epsilon; a subclass may write it in `reset`.
        randomize_eps: whether it is drawn at the start of each rollout.
    """

    def __init__(self, amago_env: Any, steps_anneal: int, randomize_eps: bool, repeat: Repeat, **schedule: float):
        super().__init__(amago_env)
        if steps_anneal <= 0:
            raise ValueError(f"steps_anneal is {steps_anneal!r}, but must be positive")
        held = _checked_repeat(repeat)
        for name, value in schedule.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value!r}, but must be in [0, 1]")
        self.steps_anneal, self.randomize_eps = int(steps_anneal), bool(randomize_eps)
        self.global_multiplier = np.ones(self.batched_envs)
        self._held = HeldNoise(self.action_spec, self.batched_envs, held) if held != 1.0 else None

    @property
    def multiplier(self) -> NDArray[np.float64]:
        """``global_multiplier``, (B,): the factor of epsilon in each row's rollout."""
        return self.global_multiplier

    @multiplier.setter
    def multiplier(self, value: NDArray[np.float64]) -> None:
        self.global_multiplier = value

    def schedule(self, local_step: NDArray[np.int64]) -> Any:
        """Epsilon before the factor: a number, or (B,)."""
        raise NotImplementedError

    def _anneal(self, start: float, end: float) -> float:
        progress = self.global_step / self.steps_anneal
        return end if progress >= 1.0 else start + (end - start) * progress

    def current_eps(self, local_step: NDArray[np.int64], horizon: int | None = None) -> NDArray[np.float64]:
        """Epsilon (B,) of the next action, whose index in its rollout is ``local_step`` (B,), as a new array.

        It is called without ``horizon``, which is not used: code written for amago 0.1 passes it.
        """
        return self.global_multiplier * self.schedule(local_step)

    def exploration_metrics(self) -> dict[str, float]:
        """ "Epsilon": that of the next action, in the mean over rows."""
        hook: Callable[..., Any] = self.current_eps
        needed = sum(p.default is p.empty for p in inspect.signature(hook).parameters.values())
        arguments = (self.local_step, self.amago_env.horizon)  # overrides written for amago 0.1 need the second
        return {"Epsilon": float(np.mean(hook(*arguments[: max(1, needed)])))}

    def on_rollout_start(self, opened: NDArray[np.bool_]) -> None:
        if self.randomize_eps:
            self.global_multiplier = np.where(opened, self.rng.random(self.batched_envs), self.global_multiplier)
        if self._held is not None:
            self._held.new |= opened

    def add_exploration_noise(self, action: Array, local_step: NDArray[np.int64], horizon: int | None = None) -> Array:
        eps = self.current_eps(local_step)
        spec, rng, b = self.action_spec, self.rng, self.batched_envs
        if self._held is not None:
            return self._held.apply(action, eps, rng)
        if spec.kind == "discrete":
            if b == 1:  # the common case, without arrays unless it explores
                if rng.random() >= eps[0]:
                    return action
                return np.array([[int(rng.random() * spec.dim)]], dtype=action.dtype)  # integers() takes ten times as long
            explore = rng.random(b) < eps
            if not explore.any():
                return action
            return _noisy("discrete", spec.dim, action, eps, rng, explore)
        if spec.kind in ("continuous", "multibinary"):
            return _noisy(spec.kind, spec.dim, action, eps, rng)
        noisy = action.copy()
        for part in spec.parts:
            noisy[:, part.stored] = _noisy(part.kind, part.dim, action[:, part.stored], eps, rng)
        return noisy

    def action_probabilities(self, probabilities: Array, local_step: NDArray[np.int64]) -> Array:
        eps = self.current_eps(local_step)
        if self._held is not None:
            return self._held.probabilities(probabilities, eps)
        return behaviour.with_random_actions(self.action_spec, probabilities, eps)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"multiplier": np.asarray(self.global_multiplier, dtype=np.float64).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["multiplier"]) != self.batched_envs:
            raise ValueError(f"multiplier has {len(state['multiplier'])} rows, but there are {self.batched_envs} environments")
        super().load_state_dict(state)
        self.global_multiplier = np.asarray(state["multiplier"], dtype=np.float64)


def _noisy(
    kind: str, dim: int, action: Array, eps: NDArray[np.float64], rng: np.random.Generator, explore: Array | None = None
) -> Array:
    """Add noise of strength eps (B,) to one part of stored actions (B, s).

    ``explore`` (B,) says which discrete actions become random; None: draw it.
    """
    if kind == "discrete":
        drawn = rng.random(len(action)) < eps if explore is None else explore
        return np.where(drawn[:, None], rng.integers(dim, size=(len(action), 1), dtype=np.int64), action)
    if kind == "multibinary":
        flip = rng.random(action.shape) < eps[:, None]
        return np.where(flip, 1 - action, action).astype(action.dtype)
    noisy = action + eps[:, None] * rng.standard_normal(action.shape)
    return np.minimum(np.maximum(noisy, -1.0), 1.0).astype(np.float32)


@register_exploration("egreedy")
@gin.configurable
class EpsilonGreedy(_AnnealedNoise):
    """Random actions with probability eps, annealed linearly over the steps of one actor.

    A discrete action is replaced by a uniform one with probability eps. A continuous action a becomes a + eps N(0, 1), clipped to
    [-1, 1]. Each bit of a MultiBinary action is flipped with probability eps. The parts of an action are treated independently.

    Args:
        amago_env: the environment to wrap.
        eps_start: eps at the actor's first step.
        eps_end: eps from the actor's step ``steps_anneal`` on.
        steps_anneal: length of the schedule in steps of one actor.
        randomize_eps: multiply eps by u, drawn uniformly from [0, 1) for each rollout of each actor.
        repeat: mean number of steps that a random choice, or the noise of a continuous action, is held. 1: each step has its own.
            Longer choices move further, and find goals that independent noise does not reach. A pair (low, high): drawn between these
            for each rollout, log-uniformly, so that some rollouts explore in small steps and others in long ones.

    Raises:
        ValueError: an eps is outside [0, 1], ``steps_anneal`` is not positive, or a ``repeat`` is below 1.
    """

    def __init__(
        self,
        amago_env: Any,
        eps_start: float = 1.0,
        eps_end: float = 0.05,
        steps_anneal: int = 1_000_000,
        randomize_eps: bool = True,
        repeat: Repeat = 1.0,
    ):
        super().__init__(amago_env, steps_anneal, randomize_eps, repeat, eps_start=eps_start, eps_end=eps_end)
        self.eps_start, self.eps_end = eps_start, eps_end

    def schedule(self, local_step: NDArray[np.int64]) -> float:
        return self._anneal(self.eps_start, self.eps_end)


@register_exploration("bilevel")
@gin.configurable
class BilevelEpsilonGreedy(_AnnealedNoise):
    """`EpsilonGreedy` whose eps also changes over a rollout, for meta-learning with a finite horizon (AMAGO, appendix A).

    eps(n, t) = u [e0(n) + (e1(n) - e0(n)) min(1, t / rollout_horizon)], where n counts the actor's steps over all rollouts and t
    those of this rollout; e0 goes linearly from ``eps_start_start`` to ``eps_start_end`` and e1 from ``eps_end_start`` to
    ``eps_end_end`` over ``steps_anneal`` steps of the actor.

    Args:
        amago_env: the environment to wrap.
        rollout_horizon: steps of a rollout; must be bound with gin.
        eps_start_start: eps at the start of a rollout, at the start of training.
        eps_start_end: eps at the start of a rollout, from step ``steps_anneal`` on.
        eps_end_start: eps at the end of a rollout, at the start of training.
        eps_end_end: eps at the end of a rollout, from step ``steps_anneal`` on.
        steps_anneal, randomize_eps, repeat: as in `EpsilonGreedy`.

    Raises:
        ValueError: an eps is outside [0, 1], ``steps_anneal`` or ``rollout_horizon`` is not positive, or a ``repeat`` is below 1.
    """

    def __init__(
        self,
        amago_env: Any,
        rollout_horizon: int = gin.REQUIRED,
        eps_start_start: float = 1.0,
        eps_start_end: float = 0.05,
        eps_end_start: float = 0.8,
        eps_end_end: float = 0.01,
        steps_anneal: int = 1_000_000,
        randomize_eps: bool = True,
        repeat: Repeat = 1.0,
    ):
        super().__init__(
            amago_env, steps_anneal, randomize_eps, repeat,
            eps_start_start=eps_start_start, eps_start_end=eps_start_end, eps_end_start=eps_end_start, eps_end_end=eps_end_end,
        )  # fmt: skip
        if rollout_horizon <= 0:
            raise ValueError(f"rollout_horizon is {rollout_horizon!r}, but must be positive")
        self.rollout_horizon = rollout_horizon
        self.eps_start = (eps_start_start, eps_start_end)
        self.eps_end = (eps_end_start, eps_end_end)

    def schedule(self, local_step: NDArray[np.int64]) -> NDArray[np.float64]:
        e0, e1 = self._anneal(*self.eps_start), self._anneal(*self.eps_end)
        return e0 + (e1 - e0) * np.minimum(1.0, local_step / self.rollout_horizon)
