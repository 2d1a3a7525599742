"""`check_env`: check that an environment keeps the contract that training relies on."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.findings import Findings, StopChecking
from amago.envs.amago_env import AMAGOEnv, AMAGOWrapper, innermost
from amago.envs.exploration import made_legal
from amago.envs.inner_env import learning_wrappers, reset_arguments
from amago.envs.recorder import Recorder
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX
from amago.hindsight import Timestep
from amago.spaces import action_mask_key

Array = NDArray[Any]
Env = AMAGOEnv | AMAGOWrapper


def check_env(make_env: Callable[[], Any], *, steps: int = 200, seed: int = 0, seeded: bool = True) -> None:
    """Try an environment with random actions, and report the faults that would break training.

    Checked are: the spaces, and that every environment made has the same ones; what `reset` and `step` return (their number,
    structure, shapes, dtypes, bounds, NaN, the types of reward, terminated, truncated and info); that the environment's name is
    a str; that entries of ``info`` under `AMAGO_ENV_LOG_PREFIX` are finite numbers; and that one seed and the same actions give
    the same rollout.

    Two environments are made, and closed. The global random numbers of the process are left as they were.

    Args:
        make_env: as ``make_train_env`` of an `Experiment`: returns an `AMAGOEnv`, or a Gymnasium environment to be wrapped in
            one.
        steps: taken in each trial; a rollout that ends is followed by the next.
        seed: of the environment's first reset and of the actions.
        seeded: require that a seed repeats the rollout. False: for simulators that run in real time, which cannot.

    Raises:
        CheckError: lists all faults that were found.
        TypeError: ``make_env`` is no function.
    """
    if not callable(make_env):
        raise TypeError(f"make_env is {make_env!r}, but must be a function that makes an environment: check_env(lambda: ...)")
    findings = Findings("check_env found faults of the environment")
    made: list[Env] = []
    kept, numpys = random.getstate(), np.random.get_state()
    try:
        with suppress(StopChecking):
            made.append(_make(make_env, findings))
            second = _make(make_env, findings)
            if second is made[0] or second.unwrapped is made[0].unwrapped:
                findings.add(
                    "make_env() returned the same environment twice; every call must make a new one, one for each actor"
                )
                raise StopChecking
            made.append(second)
            one, two = innermost(made[0], ""), innermost(second, "")
            for space, a, b in (
                ("observation_space", one.raw_observation_space, two.raw_observation_space),
                ("action_space", one.action_spec.space, two.action_spec.space),
            ):
                if a != b:
                    findings.add(
                        f"{space} differs between two environments that make_env() made: {a} and {b}; all actors need the same"
                    )
                    raise StopChecking
            name = _attempt("env_name", findings, lambda: made[0].env_name)
            if not isinstance(name, str):
                findings.add(f"env_name is {name!r}, but must be a str")
                raise StopChecking
            for wrapper in learning_wrappers(one.env.env):
                findings.add(
                    f"{wrapper} learns statistics in each environment by itself, and they are not saved with the policy: evaluations and "
                    "load_policy see other numbers than training. Leave it out (encoders normalise what they read, and critics their "
                    "targets), or set its update_running_mean to False with statistics that are part of your code"
                )
            trials = [_trial(env, steps, seed, findings) for env in made]
            if seeded and not findings and (difference := _difference(*trials)) is not None:
                again = _trial(made[0], steps, seed, findings)
                findings.add(_why_not_repeated(made[0], difference, _difference(trials[0], again) is None))
    finally:
        for env in made:
            with findings.attempt("close()"):
                env.close()
        random.setstate(kept)
        np.random.set_state(numpys)
    findings.finish()


def _make(make_env: Callable[[], Any], findings: Findings) -> Env:
    """An environment whose flags are checked in each step."""
    env = _attempt("make_env()", findings, make_env)
    if not isinstance(env, AMAGOEnv | AMAGOWrapper):
        try:
            env = AMAGOEnv(env, batched_envs=env.num_envs if isinstance(env, gym.vector.VectorEnv) else 1)
        except (TypeError, ValueError, AttributeError) as err:
            findings.add(f"make_env() returned what cannot be wrapped in an AMAGOEnv: {err}")
            raise StopChecking from None
    base = innermost(env, "")
    inner_step = base.inner_step
    right = f"{base.batched_envs} bools" if base.vectorized else "a bool"

    def checked_step(action: Array) -> Any:
        out = inner_step(action)
        for name, value in zip(("terminated", "truncated"), out[2:4] if isinstance(out, tuple) and len(out) == 5 else ()):
            flags = np.asarray(value)
            known = any(f" as {name}, " in p for p in findings.problems)
            if not known and (flags.dtype != bool or flags.size != base.batched_envs):
                findings.add(f"step() returned {value!r} as {name}, which must be {right}")
        return out

    base.inner_step = checked_step  # type: ignore[method-assign]
    return env


def _attempt(doing: str, findings: Findings, call: Callable[..., Any], *args: object) -> Any:
    """The result of a call; an exception is a finding, after which checking cannot go on."""
    with findings.attempt(doing):
        return call(*args)
    raise StopChecking


# ---- one trial -----------------------------------------------------------------------------------------------------------


def _trial(env: Env, steps: int, seed: int, findings: Findings) -> list[dict[str, Array]]:
    """Take steps with random actions; returns the observation after each, and adds the faults to the findings."""
    base = innermost(env, "")
    spec, log, recorder = base.action_spec, [], Recorder(base)
    action_space, before = copy.deepcopy(spec.space), copy.deepcopy(base.raw_observation_space)
    action_space.seed(seed)
    mask_key, rng = action_mask_key(base.observation_space, spec), np.random.default_rng(seed)

    def reset(first: int | None) -> Timestep:
        doing = "reset()" if first is None else f"reset(seed={first})"
        step, info = _attempt(doing, findings, lambda: env.reset(seed=first))
        check("reset()", step.obs, info, lambda: recorder.opened(step.obs, info))
        log.append(dict(step.obs))
        return step  # type: ignore[no-any-return]

    def check(of: str, obs: dict[str, Array], info: object, record: Callable[[], object]) -> None:
        if not isinstance(info, dict):
            findings.add(f"{of} returned {info!r} as info, which must be a dict")
            raise StopChecking
        try:
            record()
        except ValueError as err:  # of what is logged
            findings.add(str(err))
        _check_bounds(base, obs, findings)

    step = reset(seed)
    for _ in range(steps):
        action = np.stack([spec.from_env(action_space.sample()) for _ in range(base.batched_envs)])
        if mask_key is not None:
            action = made_legal(spec, action, step.obs[mask_key], rng)
        taken = " ".join(repr(spec.to_env(action if base.vectorized else action[0])).split())
        out = _attempt(f"step({taken})", findings, env.step, action)
        step, reward, terminated, truncated, info = out
        check("step()", step.obs, info, lambda: recorder.stepped(step.obs, *out[1:]))  # noqa: B023  (called at once)
        log.append({**step.obs, "the reward": reward, "terminated": terminated, "truncated": truncated})
        if (terminated | truncated).any() and not base.vectorized:
            step = reset(None)
    sums = [{name: both[0] for name, both in row.items()} for row in recorder.metrics]  # of unfinished rollouts
    for metrics in [*(episode.metrics for episode in recorder.drain()[0]), *sums]:
        for name, value in metrics.items():
            if not np.isfinite(value):
                findings.add(
                    f"the mean of info['{AMAGO_ENV_LOG_PREFIX} {name}'] over a rollout is {value}: leave entries out that are not finite"
                )
    after = getattr(base.env.env, "observation_space", before)
    if after != before and not base.vectorized:
        findings.add(f"observation_space was {before} and is {after} after a rollout; it must not change")
    return [{key: np.array(value) for key, value in entry.items()} for entry in log]


def _check_bounds(base: AMAGOEnv, obs: dict[str, Array], findings: Findings) -> None:
    for key, value in obs.items():
        box = base.observation_space[key]
        assert isinstance(box, gym.spaces.Box)
        slack = 1e-4 if box.dtype is not None and np.dtype(box.dtype).kind == "f" else 0.0
        low, high = (bound.astype(np.float64) for bound in (box.low, box.high))
        far = (value < low - slack * (1.0 + np.abs(low))) | (value > high + slack * (1.0 + np.abs(high)))
        if far.any() and not any(f"observation {key!r} is" in p for p in findings.problems):
            row = np.argwhere(far)[0]
            at = tuple(int(i) for i in row[1:])
            findings.add(
                f"observation {key!r} is {value[tuple(row)]}{f' at {at}' if at else ''}, outside of its space, {low[at]} to {high[at]}: "
                "correct the space or the observation; policies and recorded data are compared by these bounds"
            )


# ---- seeds ---------------------------------------------------------------------------------------------------------------


def _difference(a: list[dict[str, Array]], b: list[dict[str, Array]]) -> str | None:
    """Describe the first difference between two trials; None if all is equal."""
    for t, (x, y) in enumerate(zip(a, b)):
        for key in x:
            if key not in y or not np.array_equal(x[key], y[key]):
                name = key if key in ("the reward", "terminated", "truncated") else f"observation {key!r}"
                return f"{name} in the first reset" if t == 0 else f"{name} after {t} steps and resets"
    return None if len(a) == len(b) else "one ends sooner"


def _why_not_repeated(env: Env, difference: str, repeats_itself: bool) -> str:
    """The fault of two environments, seeded alike, whose trials differ; ``repeats_itself``: one of them does not repeat its own."""
    advice = "or pass seeded=False if the environment cannot repeat itself (runs with a seed then do not repeat either)"
    if "seed" not in reset_arguments(innermost(env, "").env.env):
        return (
            f"two rollouts with the same actions differ ({difference}), and reset() has no argument seed by which they could be repeated: "
            f"add reset(self, *, seed=None, options=None) and draw random numbers from self.np_random, {advice}"
        )
    if repeats_itself:
        return (
            f"two environments that make_env() made differ after the same reset(seed=...) ({difference}): what is drawn at random when "
            f"an environment is made must be drawn in reset(), from self.np_random, {advice}"
        )
    return (
        f"two rollouts with the same seed and actions differ ({difference}): call super().reset(seed=seed) in reset(), and draw all "
        f"random numbers from self.np_random, {advice}"
    )
