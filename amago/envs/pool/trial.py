"""Trying an environment for some steps before a run, to find mistakes in it while nothing is lost."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.envs.environment import AMAGOEnv
from amago.envs.legal import made_legal
from amago.envs.pool.faults import EnvironmentMistake, mistake_in
from amago.spaces import ActionSpec, action_mask_key

_SECONDS = 1.0


def try_environment(made: Any, base: AMAGOEnv, steps: int, seed: np.random.SeedSequence) -> None:
    """Reset an environment and take random actions. It is reset or closed next.

    Other errors than mistakes are ignored: they may be crashes, which a pool of actors survives.

    Args:
        made: what the user's function returned.
        base: the `AMAGOEnv` inside it.
        steps: the most to take; a slow environment takes fewer, within about a second.
        seed: of the reset and the actions.

    Raises:
        EnvironmentMistake: an error of type or shape, with its cause.
    """
    done = 0
    try:
        rng, until = np.random.default_rng(seed), time.monotonic() + _SECONDS
        mask_key = action_mask_key(base.observation_space, base.action_spec)
        ts, _ = made.reset(seed=int(rng.integers(2**30)))
        while done < steps and time.monotonic() < until:
            action = random_action(base.action_spec, base.batched_envs, rng)
            if mask_key is not None:
                action = made_legal(base.action_spec, action, ts.obs[mask_key], rng)
            done += 1
            ts, _, terminated, truncated, _ = made.step(action)
            if base.auto is None and (terminated | truncated).any():
                ts, _ = made.reset()
    except (Exception, SystemExit) as err:
        mistake = mistake_in(err)
        if mistake:
            when = f"in its step {done}" if done else "in its reset"
            raise EnvironmentMistake(
                f"{mistake}\nThe environment {_name(base)} raised this {when}, while it was tried with random actions before the run "
                "(Experiment.env_trial_steps)."
            ) from None


def _name(base: AMAGOEnv) -> str:
    try:
        return repr(base.env_name)
    except Exception:
        return type(base.unwrapped).__name__


def random_action(spec: ActionSpec, batch: int, rng: np.random.Generator) -> NDArray[Any]:
    """Uniform actions (B, S) in stored form."""
    out = np.empty((batch, spec.stored_dim), dtype=spec.stored_dtype)
    for part in spec.parts:
        shape = out[:, part.stored].shape
        if part.kind == "continuous":
            out[:, part.stored] = rng.uniform(-1.0, 1.0, shape)
        else:
            out[:, part.stored] = rng.integers(part.dim if part.kind == "discrete" else 2, size=shape)
    return out


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global random generators after the block, so that it does not change what a seeded run draws."""
    torch = sys.modules.get("torch")  # actors do not import it, but an environment may
    of_random, of_numpy = random.getstate(), np.random.get_state()
    of_torch = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(of_random)
        np.random.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)
