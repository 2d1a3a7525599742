"""The actor pool: N environments that step side by side, in this process or in worker processes (numpy only, never torch).

| module | content |
| --- | --- |
| `make` | `make_pool`, the way to start a pool |
| `auto` | the choice between "sync" and "async" by measuring |
| `base` | `ActorPool`, the interface of every pool |
| `sync` | actors in this process |
| `subprocess` | actors in worker processes; `supervisor` starts and replaces these |
| `handle`, `protocol`, `worker` | the learner's side of one worker, the messages, the worker's side |
| `plan`, `actor`, `actor_set` | the actors of one process: what they are made from, one, all |
| `buffers`, `memory` | the arrays that actors and policy share |
| `faults` | environment faults, the restart budget, and mistakes that end a run |
| `view`, `vector` | calling environments by name; a pool as a vector environment |
| `trial` | trying an environment before a run |
"""

from amago.envs.pool.base import ActorPool
from amago.envs.pool.faults import ActorError, EnvironmentMistake
from amago.envs.pool.make import ENV_MODES, make_pool
from amago.envs.pool.sync import InProcessPool
from amago.envs.pool.vector import PoolEnv

__all__ = ["ENV_MODES", "ActorError", "ActorPool", "EnvironmentMistake", "InProcessPool", "PoolEnv", "make_pool"]
