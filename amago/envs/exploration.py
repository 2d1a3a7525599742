"""Exploration: noise added to the policy's actions, as wrappers around an `AMAGOEnv`.

Each actor has its own wrapper and random generator. Schedules count the steps of one actor and are saved in checkpoints
(`ExplorationWrapper.state_dict`).
"""

from __future__ import annotations

import inspect
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import bindings
from amago.envs.amago_env import Step, innermost
from amago.envs.inner_env import assignable, forwarded
from amago.hindsight import Timestep
from amago.registry import Registry
from amago.spaces import ActionSpec, action_mask_key

Array = NDArray[Any]

EXPLORATION: Registry[type[ExplorationWrapper]] = Registry("exploration")
"""The exploration strategy of each name."""
register_exploration = EXPLORATION.register
get_exploration_cls = EXPLORATION.find
list_registered_explorations = EXPLORATION.names


class ExplorationWrapper(gym.ActionWrapper[Any, Any, Any]):
    """Base class of exploration: subclass it and override `add_exploration_noise`.

    If an `amago.spaces.ActionMask` is bound, illegal choices after the noise are replaced by legal ones drawn uniformly, and
    bits that may not be 1 by 0.

    Attributes:
        amago_env: the `AMAGOEnv` inside all wrappers.
        rng: the generator from which to draw all randomness; each actor's has its own seed.
        global_step: steps that this actor has taken over all rollouts.

    Raises:
        TypeError: there is no `AMAGOEnv` inside.
        ValueError: the mask does not fit its spaces.
    """

    __getattr__ = forwarded

    is_independent = False
    """Whether the noise of a step is `random_part` with `EpsilonGreedy.current_eps`, and depends on no other step."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if vars(cls).keys() & {"add_exploration_noise", "action", "on_rollout_start"}:
            cls.is_independent = bool(vars(cls).get("is_independent"))

    def __init__(self, amago_env: gym.Env[Any, Any]):
        self.amago_env = innermost(amago_env, f"{type(self).__name__} needs an AMAGOEnv, but got")
        super().__init__(amago_env)
        self.action_spec, self.rl2_space = self.amago_env.action_spec, self.amago_env.rl2_space
        self.batched_envs = self.amago_env.batched_envs
        self._mask_key = action_mask_key(self.amago_env.observation_space, self.action_spec)
        self._mask: Array | None = None  # of the next action, (B, ...)
        self.rng = np.random.default_rng()
        self.global_step = 0

    @assignable
    def env_name(self) -> str:
        return self.amago_env.env_name

    @assignable
    def local_step(self) -> NDArray[np.int64]:
        """(B,) index of the next action in its rollout."""
        return self.amago_env.step_count

    def add_exploration_noise(self, action: Array, local_step: NDArray[np.int64]) -> Array:
        """Return the actions (B, S) to take instead of the policy's, of the same dtype.

        Args:
            action: (B, S) in stored form (`amago.spaces`); do not change it in place.
            local_step: (B,) index of each action in its rollout. ``self.amago_env.horizon`` is the most steps of a rollout, if
                known.
        """
        raise NotImplementedError(f"{type(self).__name__} must override add_exploration_noise(action, local_step)")

    def fit_to_run(self, steps: int, pretrained: bool) -> None:
        """Called once by a run, before the first reset; the default does nothing.

        Args:
            steps: that each actor takes in the whole run.
            pretrained: the run begins with trained weights (`Experiment.init_from`).
        """

    def describe_schedule(self) -> str:
        """A line for the summary of a run; the default is the class's name."""
        return type(self).__name__

    def on_rollout_start(self, opened: NDArray[np.bool_]) -> None:
        """Called when new rollouts begin in the rows where ``opened`` (B,) is True; the default does nothing."""

    def exploration_metrics(self) -> dict[str, float]:
        """Numbers to be logged at the end of each collection phase, as means over actors; default: none."""
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
        """The action to take instead of the policy's, (B, S), or (S,) of one environment, in the same shape."""
        batch = action if action.ndim == 2 else action.reshape(1, -1)
        noisy = self.add_exploration_noise(batch, self.amago_env.step_count)
        if self._mask is not None:
            noisy = made_legal(self.action_spec, noisy, self._mask, self.rng)
        return action if noisy is batch else noisy if action.ndim == 2 else noisy[0]

    def step(self, action: object) -> Step:  # type: ignore[override]  # arrays: rows side by side
        taken = self.action(self.amago_env.check_action(action))  # clipping would hide a number out of bounds
        self.global_step += 1
        out: Any = self.env.step(taken)
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
        """Restore schedule and random state from `state_dict`; rollouts in progress are not part of it."""
        self.global_step = int(state["global_step"])
        if state["rng"] is not None and isinstance(self.rng, np.random.Generator):
            self.rng.bit_generator.state = state["rng"]


def made_legal(spec: ActionSpec, action: Array, mask: Array, rng: np.random.Generator) -> Array:
    """Replace illegal choices by legal ones drawn uniformly, and illegal bits by 0.

    Args:
        action: (B, S) in stored form, which is not changed.
        mask: (B, ...), the `amago.spaces.ActionMask`: 0 where illegal.
    """
    legal = (mask != 0).reshape(len(action), spec.dim)
    out = action.copy()
    for part in spec.parts:
        allowed, column = legal[:, part.vector], part.stored.start
        if part.kind == "discrete":
            chosen = np.take_along_axis(allowed, action[:, column, None].astype(np.int64), axis=1)[:, 0]
            for row in np.flatnonzero(~chosen & allowed.any(axis=1)):
                out[row, column] = rng.choice(np.flatnonzero(allowed[row]))
        elif part.kind == "multibinary":
            out[:, part.stored] *= allowed
    return out


def random_part(
    kind: str, dim: int, action: Array, eps: NDArray[np.float64], rng: np.random.Generator, explore: Array | None = None
) -> Array:
    """Add noise of strength eps (B,) to one part of stored actions (B, s).

    ``explore`` (B,) is True where a discrete action becomes random; None: draw it.
    """
    if kind == "discrete":
        drawn = rng.random(len(action)) < eps if explore is None else explore
        return np.where(drawn[:, None], rng.integers(dim, size=(len(action), 1), dtype=np.int64), action)
    if kind == "multibinary":
        flip = rng.random(action.shape) < eps[:, None]
        return np.where(flip, 1 - action, action).astype(action.dtype)
    noisy = action + eps[:, None] * rng.standard_normal(action.shape)
    return np.minimum(np.maximum(noisy, -1.0), 1.0).astype(np.float32)


class HeldNoise:
    """Random actions held for geometrically distributed numbers of steps (temporally extended exploration, Dabney et al. 2021,
    arXiv 2006.01782).

    Args:
        spec: of the action space.
        rows: B.
        low, high: mean length of a choice; if they differ, drawn between them for each rollout, log-uniformly.
    """

    def __init__(self, spec: ActionSpec, rows: int, low: float, high: float):
        self.spec, self.range = spec, np.log([low, high])
        self.mean_steps = np.full(rows, float(low))
        shape = (rows, spec.stored_dim)
        self.new = np.ones(rows, dtype=bool)  # a rollout begins
        self.on = np.zeros(shape, dtype=bool)  # a random choice is being held
        self.noise = np.zeros(shape)

    def apply(self, action: Array, eps: NDArray[np.float64], rng: np.random.Generator) -> Array:
        """The actions (B, S) with noise of strength eps (B,). The share of random choices is eps, whatever their length."""
        if self.range[0] < self.range[1] and self.new.any():
            self.mean_steps = np.where(
                self.new, np.exp(rng.uniform(self.range[0], self.range[1], len(self.new))), self.mean_steps
            )
        m = self.mean_steps[:, None]
        hold = (rng.random(self.on.shape) * m >= 1.0) & ~self.new[:, None]
        e = eps[:, None]
        begins = np.where(self.new[:, None], e, e / (m - e * (m - 1.0)))  # where none is being held
        self.on &= hold
        begin = ~self.on & (rng.random(self.on.shape) < begins)
        self.on |= begin
        self.new[:] = False
        out = action.copy()
        for part in self.spec.parts:
            where = part.stored
            if part.kind == "discrete":
                drawn = rng.integers(part.dim, size=self.noise[:, where].shape)
                self.noise[:, where] = np.where(begin[:, where], drawn, self.noise[:, where])
                out[:, where] = np.where(self.on[:, where], self.noise[:, where], action[:, where])
            elif part.kind == "multibinary":
                out[:, where] = np.where(self.on[:, where], 1 - action[:, where], action[:, where])
            else:
                fresh = rng.standard_normal(self.noise[:, where].shape)
                self.noise[:, where] = np.where(hold[:, where], self.noise[:, where], fresh)
                out[:, where] = np.clip(action[:, where] + eps[:, None] * self.noise[:, where], -1.0, 1.0)
        return out


Repeat = float | tuple[float, float]
"""Steps that a random choice is held on average, or the range from which that is drawn."""


def _check_shares(**given: float) -> None:
    for name, value in given.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value!r}, but must be in [0, 1]")


ANNEAL = 1_000_000
"""Steps of an actor over which epsilon falls, if neither the caller nor the run sets them."""


@register_exploration("egreedy")
@gin.configurable
class EpsilonGreedy(ExplorationWrapper):
    """Random actions with probability eps, annealed linearly over the steps of one actor.

    A discrete action is replaced by a uniform one with probability eps. A continuous action a becomes a + eps N(0, 1), clipped
    to [-1, 1]. Each bit of a MultiBinary action is flipped with probability eps. The parts of an action are treated
    independently.

    Args:
        amago_env: the environment to wrap.
        eps_start: eps at the actor's first step. Unless it is bound or given another value, an `Experiment` that ``init_from`` gives trained
            weights begins with ``eps_end``.
        eps_end: eps from the actor's step ``steps_anneal`` on.
        steps_anneal: length of the schedule in steps of one actor. Unless it is bound or given another value, an `Experiment` shortens it
            to half of the run.
        randomize_eps: multiply eps by u, drawn uniformly from [0, 1) for each rollout of each actor.
        repeat: mean number of steps that a random choice, or the noise of a continuous action, is held. 1: each step has its
            own. Longer choices move further, and find goals that independent noise does not reach. A pair (low, high): drawn
            between these for each rollout, log-uniformly, so that some rollouts explore in small steps and others in long ones.

    Attributes:
        global_multiplier: (B,) the factor of epsilon; a subclass may write it in `reset`.

    Raises:
        ValueError: an eps is outside [0, 1], ``steps_anneal`` is not positive, or a ``repeat`` is below 1.
    """

    is_independent = True
    _start = "eps_start"

    def __init__(
        self,
        amago_env: gym.Env[Any, Any],
        eps_start: float = 1.0,
        eps_end: float = 0.05,
        steps_anneal: int = ANNEAL,
        randomize_eps: bool = True,
        repeat: Repeat = 1.0,
    ):
        super().__init__(amago_env)
        if steps_anneal <= 0:
            raise ValueError(f"steps_anneal is {steps_anneal!r}, but must be positive")
        low, high = repeat if isinstance(repeat, (tuple, list)) and len(repeat) == 2 else (repeat, repeat)
        if isinstance(low, (tuple, list)) or not 1.0 <= low <= high < np.inf:
            raise ValueError(f"repeat is {repeat!r}, but must be a number of steps, 1 or more, or a pair (low, high) of them")
        _check_shares(eps_start=eps_start, eps_end=eps_end)
        self.eps_start, self.eps_end = eps_start, eps_end
        self.steps_anneal, self.randomize_eps = int(steps_anneal), bool(randomize_eps)
        self._run_steps: int | None = None  # of each actor
        self.global_multiplier = np.ones(self.batched_envs)
        self._held = None if high == 1.0 else HeldNoise(self.action_spec, self.batched_envs, low, high)
        self.is_independent = type(self).is_independent and self._held is None

    def fit_to_run(self, steps: int, pretrained: bool) -> None:
        self._run_steps = steps
        if pretrained and self.eps_start == 1.0 and not self._is_bound(self._start):
            self.steps_anneal = 0
        elif self.steps_anneal == ANNEAL and not self._is_bound("steps_anneal"):
            self.steps_anneal = max(1, min(ANNEAL, steps // 2))

    def _is_bound(self, parameter: str) -> bool:
        """Whether a parameter is bound for the first class that takes it."""
        for c in type(self).__mro__:
            if any(name.endswith(f".{c.__name__}.{parameter}") for name in bindings()):
                return True
            if parameter in inspect.signature(c).parameters:
                return False
        return False

    def describe_schedule(self) -> str:
        """The class's name, and epsilon, before its factor, in the first step of a rollout, from the run's first to its last."""
        now, eps, start = self.global_step, [], np.zeros(self.batched_envs, dtype=np.int64)
        for step in (0, self._run_steps or 0):
            self.global_step = step
            eps.append(float(np.mean(self.schedule(start))))
        self.global_step = now
        return f"{type(self).__name__}, epsilon {eps[0]:.2f} -> {eps[1]:.2f} in this run"

    def annealed(self, start: float, end: float) -> float:
        """The present value of a schedule that goes linearly from ``start`` to ``end`` over ``steps_anneal`` steps."""
        if self.global_step >= self.steps_anneal:
            return end
        return start + (end - start) * (self.global_step / self.steps_anneal)

    def schedule(self, local_step: NDArray[np.int64]) -> float | NDArray[np.float64]:
        """Epsilon before the factor: a number, or (B,)."""
        return self.annealed(self.eps_start, self.eps_end)

    def current_eps(self, local_step: NDArray[np.int64]) -> NDArray[np.float64]:
        """Epsilon (B,) of the next action, whose index in its rollout is ``local_step`` (B,), as a new array.

        Of actors on a device, ``local_step`` and `global_multiplier` are tensors: an override keeps to operators that both have.
        """
        return self.global_multiplier * self.schedule(local_step)

    def exploration_metrics(self) -> dict[str, float]:
        """ "Epsilon": epsilon of the next action, in the mean over rows."""
        return {"Epsilon": float(np.mean(self.current_eps(self.local_step)))}

    def on_rollout_start(self, opened: NDArray[np.bool_]) -> None:
        if self.randomize_eps:
            self.global_multiplier = np.where(opened, self.rng.random(self.batched_envs), self.global_multiplier)
        if self._held is not None:
            self._held.new |= opened

    def add_exploration_noise(self, action: Array, local_step: NDArray[np.int64]) -> Array:
        eps = self.current_eps(local_step)
        spec, rng, b = self.action_spec, self.rng, self.batched_envs
        if self._held is not None:
            return self._held.apply(action, eps, rng)
        if spec.kind == "discrete" and b == 1:  # the common case, without arrays unless it explores
            if rng.random() >= eps[0]:
                return action
            return np.array([[int(rng.random() * spec.dim)]], dtype=action.dtype)  # integers() takes ten times as long
        if spec.kind == "discrete":
            explore = rng.random(b) < eps
            return random_part("discrete", spec.dim, action, eps, rng, explore) if explore.any() else action
        noisy = action.copy()
        for part in spec.parts:
            noisy[:, part.stored] = random_part(part.kind, part.dim, action[:, part.stored], eps, rng)
        return noisy

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"multiplier": np.asarray(self.global_multiplier, dtype=np.float64).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["multiplier"]) != self.batched_envs:
            raise ValueError(f"multiplier has {len(state['multiplier'])} rows, but there are {self.batched_envs} environments")
        super().load_state_dict(state)
        self.global_multiplier = np.asarray(state["multiplier"], dtype=np.float64)


@register_exploration("bilevel")
@gin.configurable
class BilevelEpsilonGreedy(EpsilonGreedy):
    """`EpsilonGreedy` whose eps also changes over a rollout, for meta-learning with a finite horizon (AMAGO, appendix A).

    eps(n, t) = u [e0(n) + (e1(n) - e0(n)) min(1, t / rollout_horizon)], where n counts the actor's steps over all rollouts and
    t the steps of this rollout; e0 goes linearly from ``eps_start_start`` to ``eps_start_end`` and e1 from ``eps_end_start`` to
    ``eps_end_end`` over ``steps_anneal`` steps of the actor.

    Args:
        amago_env: the environment to wrap.
        rollout_horizon: steps of a rollout; must be bound with gin.
        eps_start_start: eps at the start of a rollout, at the start of training; unless bound, as ``eps_start`` of `EpsilonGreedy`.
        eps_start_end: eps at the start of a rollout, from step ``steps_anneal`` on.
        eps_end_start: eps at the end of a rollout, at the start of training.
        eps_end_end: eps at the end of a rollout, from step ``steps_anneal`` on.
        steps_anneal, randomize_eps, repeat: as in `EpsilonGreedy`.

    Raises:
        ValueError: an eps is outside [0, 1], ``steps_anneal`` or ``rollout_horizon`` is not positive, or a ``repeat`` is below
            1.
    """

    _start = "eps_start_start"

    def __init__(
        self,
        amago_env: gym.Env[Any, Any],
        rollout_horizon: int = gin.REQUIRED,
        eps_start_start: float = 1.0,
        eps_start_end: float = 0.05,
        eps_end_start: float = 0.8,
        eps_end_end: float = 0.01,
        steps_anneal: int = ANNEAL,
        randomize_eps: bool = True,
        repeat: Repeat = 1.0,
    ):
        super().__init__(amago_env, eps_start_start, eps_start_end, steps_anneal, randomize_eps, repeat)
        _check_shares(
            eps_start_start=eps_start_start, eps_start_end=eps_start_end, eps_end_start=eps_end_start, eps_end_end=eps_end_end
        )
        if rollout_horizon <= 0:
            raise ValueError(f"rollout_horizon is {rollout_horizon!r}, but must be positive")
        self.rollout_horizon = rollout_horizon
        self.eps_of_start, self.eps_of_end = (eps_start_start, eps_start_end), (eps_end_start, eps_end_end)

    def schedule(self, local_step: NDArray[np.int64]) -> NDArray[np.float64]:
        e0, e1 = self.annealed(*self.eps_of_start), self.annealed(*self.eps_of_end)
        return e0 + (e1 - e0) * (local_step / self.rollout_horizon).clip(max=1.0)
