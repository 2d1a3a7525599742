"""The pool of actors: N environments that step side by side, in this process or in worker processes (numpy only)."""

from amago.envs.pool.base import ActorPool
from amago.envs.pool.faults import ActorError
from amago.envs.pool.make import ENV_MODES, make_pool
from amago.envs.pool.sync import InProcessPool

__all__ = ["ENV_MODES", "ActorError", "ActorPool", "InProcessPool", "make_pool"]
