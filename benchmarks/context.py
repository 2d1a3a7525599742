"""What a long memory costs: one step of 16 actors with a Transformer 256 wide, 3 layers, for contexts of 512 to 10,000 timesteps.

The ceiling is reading the valid part of the cache of keys and values once (a sum over it, as float32 numbers, whatever it holds), because
every step has to see all of it. It leaves out everything else, the products with weights included, which alone take longer than a
cache that is empty or short: see "products" in the details. So only long caches come near it.

"float32" and "bfloat16" are the kinds of numbers in the cache; weights are float32. The last row compares the cost of a step far beyond the
context with that of the first step with a full cache: the cache is a ring, and nothing in it moves.
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
    """Actors in the middle of long rollouts.

    Args:
        length: timesteps that each remembers, a few more or less.
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
        """Back to ``length``: steps make the memory longer."""
        self.cache.lengths.copy_((self.length - self.apart).clamp(min=0))
        self.cache.host_lengths[:] = self.cache.lengths.numpy()

    def step(self) -> None:
        with torch.inference_mode():
            self.agent.get_actions(self.obs, self.rl2s, self.cache.lengths[:, None].clone(), self.cache)

    def read(self) -> None:
        """The ceiling."""
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
    """Every context, empty, half full and full, with both kinds of cache; then a step far beyond the context."""
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
