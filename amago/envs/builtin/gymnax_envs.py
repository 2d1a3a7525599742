"""Environments of gymnax (Lange 2022, https://github.com/RobertTLange/gymnax) as vectorised Gymnasium environments."""

from __future__ import annotations

import gin

from amago.envs.builtin.jax_envs import JaxVectorEnv
from amago.registry import require


@gin.configurable(module="amago.envs.builtin")
class GymnaxCompatibility(JaxVectorEnv):
    """``num_envs`` copies (rows) of a gymnax environment, for ``AMAGOEnv(..., batched_envs=num_envs)``.

    Observations: ``Discrete`` and uint8 as in gymnax, bool as uint8, everything else as float32 without bounds, because several
    environments leave the bounds that they declare (MemoryChain-bsuite returns -1 in [0, 2]) or return another dtype.
    Actions and rewards: as in the gymnax environment.

    Args:
        env: a gymnax environment, the first element of the result of ``gymnax.make``.
        num_envs: B, the number of rows.
        params: parameters of the environment; None means its defaults.
        device: "cpu", "gpu" or "tpu"; None leaves the choice to JAX. If PyTorch uses the same GPU, set
            ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` before importing JAX, which otherwise reserves three quarters of the memory.
        arrays: "numpy", or "jax": actors stay on JAX's device (`amago.envs.builtin.jax_envs.JaxRows`).
    """

    keeps_indices = True

    def __init__(
        self, env: object, num_envs: int, params: object = None, device: str | None = None, arrays: str = "numpy"
    ) -> None:
        if not isinstance(env, require("gymnax.environments.environment", "gymnax").Environment):
            what = " (gymnax.make returns a pair, environment and params)" if isinstance(env, tuple) else ""
            raise TypeError(f"env must be a gymnax environment, got {env!r}{what}")
        super().__init__(env, num_envs, params, None, device, arrays)
        limit = getattr(env.default_params if params is None else params, "max_steps_in_episode", None)
        self.horizon = None if limit is None else int(limit)


GymnaxCompatability = GymnaxCompatibility
"""An alternative spelling."""
