"""`check_env`: whether an environment keeps the contract that training relies on."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.findings import Findings, StopChecking, of_exception
from amago.envs.environment import AMAGOEnv
from amago.envs.introspect import reset_arguments
from amago.envs.statistics import metric_name, metric_values
from amago.envs.wrapper import AMAGOWrapper, innermost

Array = NDArray[Any]


def check_env(make_env: Callable[[], Any], *, steps: int = 200, seed: int = 0, seeded: bool = True) -> None:
    """Try an environment with random actions, and report what training would stumble over.

    Checked are: the spaces, and that every environment made has the same ones; what `reset` and `step` return (their number, structure,
    shapes, dtypes, bounds, NaN, the types of reward, terminated, truncated and info); that the environment's name is a str; that entries
    of ``info`` under `AMAGO_ENV_LOG_PREFIX` are finite numbers; and that one seed and the same actions give the same rollout.

    Two environments are made, and closed. The global random numbers of the process are left as they were.

    Args:
        make_env: as ``make_train_env`` of an `Experiment`: returns an `AMAGOEnv`, or a Gymnasium environment to be wrapped in one.
        steps: taken in each trial; a rollout that ends is followed by the next.
        seed: of the environment's first reset and of the actions.
        seeded: False does not ask that a seed repeats the rollout, as simulators that run by a clock of their own cannot.

    Raises:
        CheckError: lists all faults that were found.
        TypeError: ``make_env`` is no function.
    """
    if not callable(make_env):
        raise TypeError(f"make_env is {make_env!r}, but must be a function that makes an environment: check_env(lambda: ...)")
    findings = Findings("check_env found faults of the environment")
    made: list[AMAGOEnv | AMAGOWrapper] = []
    with _random_numbers_kept():
        try:
            made.extend(_make_two(make_env, findings))
            with suppress(StopChecking):
                _check_name(made[0], findings)
                trials = [_trial(env, steps, seed, findings) for env in made]
                if seeded and not findings:
                    _check_repeats(made[0], trials, lambda: _trial(made[0], steps, seed, findings), findings)
        except StopChecking:
            pass
        finally:
            for env in made:
                with findings.attempt("close()"):
                    env.close()
    findings.finish()


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the global generators of `random` and numpy at the end of the block."""
    kept, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(kept)
        np.random.set_state(numpys)


def _make_two(make_env: Callable[[], Any], findings: Findings) -> Iterator[AMAGOEnv | AMAGOWrapper]:
    """Two environments, whose spaces are compared."""
    first = _made(make_env, findings)
    yield first
    second = _made(make_env, findings)
    if second is first or getattr(second, "unwrapped", 1) is getattr(first, "unwrapped", 2):
        findings.add("make_env() returned the same environment twice; every call must make a new one, one for each actor")
        raise StopChecking
    yield second
    one, two = innermost(first, ""), innermost(second, "")
    for name, a, b in (
        ("observation_space", one.raw_observation_space, two.raw_observation_space),
        ("action_space", one.action_spec.space, two.action_spec.space),
    ):
        if a != b:
            findings.add(f"{name} differs between two environments that make_env() made: {a} and {b}; all actors need the same")
            raise StopChecking


def _made(make_env: Callable[[], Any], findings: Findings) -> AMAGOEnv | AMAGOWrapper:
    try:
        env = make_env()
    except Exception as err:
        findings.add(f"make_env() raised {of_exception(err)}")
        raise StopChecking from None
    if isinstance(env, AMAGOEnv | AMAGOWrapper):
        return env
    try:
        return AMAGOEnv(env, batched_envs=getattr(env, "num_envs", 1))
    except (TypeError, ValueError, AttributeError) as err:
        findings.add(f"make_env() returned what cannot be wrapped in an AMAGOEnv: {err}")
        raise StopChecking from None


def _check_name(env: AMAGOEnv | AMAGOWrapper, findings: Findings) -> None:
    with findings.attempt("env_name"):
        if not isinstance(env.env_name, str):
            findings.add(f"env_name is {env.env_name!r}, but must be a str")


# ---- one trial -----------------------------------------------------------------------------------------------------------


def _trial(env: AMAGOEnv | AMAGOWrapper, steps: int, seed: int, findings: Findings) -> list[dict[str, Array]]:
    """Take steps with random actions; returns what was observed after each, and adds what is wrong."""
    base, log = innermost(env, ""), []
    action_space = copy.deepcopy(base.action_spec.space)
    action_space.seed(seed)
    before = copy.deepcopy(base.raw_observation_space)
    with _watched(base, findings):
        step, taken = _reset(env, base, seed, findings), 0
        log.append(dict(step.obs))
        while taken < steps:
            action = np.stack([base.action_spec.from_env(action_space.sample()) for _ in range(base.batched_envs)])
            doing = f"step({_shown(base, action)})"
            step, reward, terminated, truncated, _ = _attempt(doing, findings, env.step, action)
            _check_bounds(base, step.obs, findings)
            log.append({**step.obs, "the reward": reward, "terminated": terminated, "truncated": truncated})
            taken += 1
            if (terminated | truncated).any() and not base.vectorized:
                step = _reset(env, base, None, findings)
                log.append(dict(step.obs))
    after = getattr(base.env.env, "observation_space", before)
    if after != before and not base.vectorized:
        findings.add(f"observation_space was {before} and is {after} after a rollout; it must not change")
    return [{key: np.array(value) for key, value in entry.items()} for entry in log]


def _shown(base: AMAGOEnv, action: Array) -> str:
    return " ".join(repr(base.action_spec.to_env(action if base.vectorized else action[0])).split())


def _attempt(doing: str, findings: Findings, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call; an exception is a finding, after which the trial cannot go on."""
    try:
        return call(*args, **kwargs)
    except StopChecking:
        raise
    except Exception as err:
        findings.add(f"{doing} raised {of_exception(err)}")
        raise StopChecking from None


def _reset(env: AMAGOEnv | AMAGOWrapper, base: AMAGOEnv, seed: int | None, findings: Findings) -> Any:
    given = "" if seed is None else f"seed={seed}"
    step, _ = _attempt(f"reset({given})", findings, env.reset, seed=seed)
    _check_bounds(base, step.obs, findings)
    return step


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


@contextmanager
def _watched(base: AMAGOEnv, findings: Findings) -> Iterator[None]:
    """Check what the environment itself returns while the block runs."""
    inner = base.env
    reset, step = inner.reset, inner.step

    def watched_reset(*args: Any, **kwargs: Any) -> Any:
        out = reset(*args, **kwargs)
        if isinstance(out, tuple) and len(out) == 2:
            _check_info("reset()", out[1], base, findings)
        return out

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        out = step(*args, **kwargs)
        if isinstance(out, tuple) and len(out) == 5:
            for name, value in zip(("terminated", "truncated"), out[2:4]):
                _check_flag(name, value, base, findings)
            _check_info("step()", out[4], base, findings)
        return out

    own = {name: value for name, value in getattr(inner, "__dict__", {}).items() if name in ("reset", "step")}
    try:
        inner.reset, inner.step = watched_reset, watched_step
    except AttributeError:  # a class with slots: `AMAGOEnv` checks the rest
        yield
        return
    try:
        yield
    finally:
        del inner.reset, inner.step
        for name, value in own.items():
            setattr(inner, name, value)


def _check_flag(name: str, value: Any, base: AMAGOEnv, findings: Findings) -> None:
    array = np.asarray(value)
    if any(f" as {name}, " in p for p in findings.problems):
        return
    if array.dtype != bool or array.size != base.batched_envs:
        what = f"{base.batched_envs} bools" if base.vectorized else "a bool"
        findings.add(f"step() returned {value!r} as {name}, which must be {what}")


def _check_info(of: str, info: Any, base: AMAGOEnv, findings: Findings) -> None:
    if not isinstance(info, dict):
        findings.add(f"{of} returned {info!r} as info, which must be a dict")
        raise StopChecking
    for key, value in info.items():
        if metric_name(key) is None or base.vectorized:
            continue
        try:
            numbers = metric_values(key, value)
        except ValueError as err:
            findings.add(str(err))
            continue
        if not np.isfinite(numbers).all():
            findings.add(f"info[{key!r}] is {value}; a mean over rollouts would be, too: leave the entry out instead")


# ---- seeds ---------------------------------------------------------------------------------------------------------------


def _check_repeats(
    env: AMAGOEnv | AMAGOWrapper, trials: list[list[dict[str, Array]]], again: Callable[[], Any], findings: Findings
) -> None:
    """Compare the trials of two environments, made alike and seeded alike."""
    difference = _difference(*trials)
    if difference is None:
        return
    advice = "or pass seeded=False if the environment cannot repeat itself (runs with a seed then do not repeat either)"
    if "seed" not in reset_arguments(innermost(env, "").env.env):
        findings.add(
            f"two rollouts with the same actions differ ({difference}), and reset() has no argument seed by which they could be repeated: "
            f"add reset(self, *, seed=None, options=None) and draw random numbers from self.np_random, {advice}"
        )
    elif _difference(trials[0], again()) is None:
        findings.add(
            f"two environments that make_env() made differ after the same reset(seed=...) ({difference}): what is drawn at random when "
            f"an environment is made must be drawn in reset(), from self.np_random, {advice}"
        )
    else:
        findings.add(
            f"two rollouts with the same seed and actions differ ({difference}): call super().reset(seed=seed) in reset(), and draw all "
            f"random numbers from self.np_random, {advice}"
        )


def _difference(a: list[dict[str, Array]], b: list[dict[str, Array]]) -> str | None:
    """What differs first; None if all is equal."""
    for t, (x, y) in enumerate(zip(a, b)):
        for key in x:
            if key not in y or not np.array_equal(x[key], y[key]):
                name = key if key in ("the reward", "terminated", "truncated") else f"observation {key!r}"
                return f"{name} in the first reset" if t == 0 else f"{name} after {t} steps and resets"
    return None if len(a) == len(b) else "one ends sooner"
