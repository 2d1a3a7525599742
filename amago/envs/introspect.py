"""What an environment says about itself, in the several ways that environments do."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym


def attribute(env: Any, name: str) -> Any:
    """An attribute of the environment or, where it has none (or None), of the nearest one that it wraps."""
    while env is not None:
        value = getattr(env, name, None)
        if value is not None:
            return value
        env = env.env if isinstance(env, (gym.Wrapper, gym.vector.VectorWrapper)) else None
    return None


def own_name(env: Any) -> Any:
    """``env.env_name``, else the Gymnasium id, else the class."""
    name = attribute(env, "env_name")
    if name is not None:
        return name
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def joined(names: list[str]) -> str:
    """One name for rows that have several."""
    return "+".join(sorted(set(names)))


def horizon(env: Any) -> int | None:
    """``env.horizon``, else the time limit in its Gymnasium spec, else None."""
    found = attribute(env, "horizon")
    if found is None:
        found = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    return None if found is None or callable(found) else int(found)


def reset_arguments(env: Any) -> frozenset[str]:
    """Those of "seed" and "options" that ``env.reset`` accepts: many environments for meta-learning accept neither."""
    both = frozenset({"seed", "options"})
    try:
        parameters = inspect.signature(env.reset).parameters
    except (TypeError, ValueError):
        return both
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return both
    return both & parameters.keys()


def not_gymnasium(out: Any, text: str) -> TypeError:
    """An error for what ``reset`` or ``step`` returned; ``text`` has {} in the place of its description."""
    what = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
    return TypeError(f"{text.format(what)}: does the environment follow Gymnasium's interface?")


def misfit(err: Exception) -> ValueError:
    """An error for an observation that could not be taken apart."""
    return ValueError(f"the observation does not have the structure of the observation space: {err!r}")
