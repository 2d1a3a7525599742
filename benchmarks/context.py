"""The cost of long contexts: one step of 16 actors with a Transformer of width 256 and 3 layers, for contexts of 512 to 10,000
steps.

The ceiling reads the valid part of the cache of keys and values once (as a float32 sum), which every step has to do. It leaves
out all other work. The products with weights alone take longer than reading a short cache (see "products" in the details), so
that only long caches approach the ceiling.

"float32" and "bfloat16" are the dtypes of the cache; weights are float32. The last row compares a step far beyond the context
with the first step with a full cache, which should cost the same, because the cache is a ring buffer.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch

from amago.agent import Agent
from amago.nets.kv_cache import KVCache
from benchmarks.harness import Row, compare
from benchmarks.policy_step import make_agent, milliseconds, products_alone

TARGET, TARGET_SAME = 0.6, 0.9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Remembering:
    """Actors with partly filled caches.

    Args:
        length: number of cached timesteps of each actor, minus 0 to 7.
    """

    def __init__(self, agent: Agent, actors: int, length: int, dtype: torch.dtype):
        self.agent, self.length = agent, length
        encoder: Any = agent.traj_encoder
        self.cache: KVCache = encoder.init_hidden_state(actors, "cpu", dtype=dtype)
        for numbers in (self.cache.keys, self.cache.values):
            numbers.copy_(torch.randn(numbers.shape[-1]) + torch.randn(actors, 1, 1, 1))
        self.obs, self.rl2s = {"observation": torch.randn(actors, 4)}, torch.zeros(actors, 3)
        self.apart = torch.arange(actors) % 8
        self.restart()

    def restart(self) -> None:
        """Reset the cache to ``length`` timesteps."""
        self.cache.set_lengths((self.length - self.apart).clamp(min=0))

    def step(self) -> None:
        with torch.inference_mode():
            self.agent.get_actions(self.obs, self.rl2s, self.cache.lengths[:, None].clone(), self.cache)

    def read(self) -> None:
        """Read the valid part of the cache: the ceiling."""
        tokens = max(1, min(self.length, self.cache.capacity))
        with torch.inference_mode():
            for numbers in (*self.cache.keys, *self.cache.values):
                numbers[:, :, :tokens].view(torch.float32).sum()


def _timed(steps: Remembering, seconds: float) -> Callable[[], float]:
    def contender() -> float:
        steps.restart()
        return milliseconds(steps.step, seconds)()

    return contender


def rows(options: Namespace) -> Iterator[Row]:
    """Empty, half full and full caches of both dtypes for each context; then a step far beyond the context."""
    torch.manual_seed(0)
    actors, seconds, rounds = (2, 0.0, 1) if options.smoke else (16, 0.2, options.rounds or 5)
    contexts = (8, 16) if options.smoke else (512, 2_048, 10_000)
    for context in contexts:
        agent = make_agent("Transformer", context, options.smoke)
        fills = {"empty": 0, "half full": context // 2, "full": context + 8}
        for name, dtype in DTYPES.items():
            for fill, length in fills.items():
                case = f"context {context:,}, {fill}, {name}"
                if options.only not in case:
                    continue
                steps = Remembering(agent, actors, length, dtype)
                contenders = {
                    "ours": _timed(steps, seconds),
                    "ceiling": milliseconds(steps.read, seconds),
                    "products": milliseconds(products_alone(agent, actors, 1), seconds),
                }
                steps.step()
                target = TARGET if (context, fill, name) == (contexts[-1], "full", "float32") else None
                yield compare(case, "ms", contenders, rounds, target)
    case = f"context {context:,}, step {10 * context:,} against step {context + 8:,}"
    if options.only in case:
        beyond = Remembering(agent, actors, 10 * context, torch.float32)
        first = Remembering(agent, actors, context + 8, torch.float32)
        contenders = {"ours": _timed(beyond, seconds), "ceiling": _timed(first, seconds)}
        beyond.step()
        first.step()
        yield compare(case, "ms", contenders, rounds, TARGET_SAME, note="the ceiling is the other step")
