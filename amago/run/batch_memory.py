"""The memory that a training batch takes, estimated before it is allocated."""

from __future__ import annotations

import numpy as np
import torch

from amago.agent import BaseAgent
from amago.envs.pool.memory import available_memory
from amago.loading import SequenceLoader

_GIB = 2.0**30
_DRAWN = 16  # sequences, to see how long they are
_SEED = 0x5A3
_SMALLEST_FLOAT = 2  # bytes of bfloat16, so that the estimate is a lower bound in every precision


class BatchTooLargeError(MemoryError):
    """A batch would take more memory than there is."""


def bytes_of_step(agent: BaseAgent) -> tuple[int, int]:
    """Bytes that one timestep takes at least: (in the batch, in the agent during an update).

    An update keeps for its backward pass what goes into or comes out of each matrix, whichever is narrower, and more.
    """
    obs = sum(int(np.prod(s.shape or ())) * np.dtype(s.dtype or np.float32).itemsize for s in agent.obs_space.spaces.values())
    rl2 = int(np.prod(agent.rl2_space.shape))
    data = obs + 4 * (rl2 + rl2) + 8 + 2  # rl2, reward and action, time index, done and mask
    tables = {id(p) for m in agent.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    matrices = [p for p in agent.trainable_params if p.ndim in (2, 3) and id(p) not in tables]
    kept = sum(min(p.shape[-2:]) * (p.shape[0] if p.ndim == 3 else 1) for p in matrices)
    return data, _SMALLEST_FLOAT * kept


def check_batch_memory(agent: BaseAgent, loader: SequenceLoader, max_seq_len: int) -> None:
    """Refuse a batch that certainly does not fit into memory.

    If it might not fit, some sequences are drawn to see how long they are: rollouts may be much shorter than ``max_seq_len``. They
    do not change what is trained on.

    Args:
        agent: on the device of ``loader``.
        loader: its data set has data.

    Raises:
        BatchTooLargeError: with the estimate, the memory that is available, and a batch size that may fit.
    """
    available = _available(loader.device)
    if available is None:
        return
    in_batch, in_agent = bytes_of_step(agent)
    each = in_batch + in_agent
    if loader.batch_size * (max_seq_len + 1) * each <= available:
        return
    rng = np.random.default_rng(_SEED)
    steps = 1 + max(len(loader.dataset.sample_random_trajectory(rng)) for _ in range(_DRAWN))
    needed = loader.batch_size * steps * each
    if needed > available:
        fits = int(available // (steps * each))
        advice = f"batch_size={fits} or less" if fits else "a smaller max_seq_len"
        raise BatchTooLargeError(
            f"batch_size={loader.batch_size} sequences of up to {steps - 1} steps (max_seq_len={max_seq_len}) take {needed / _GIB:,.1f} GiB at "
            f"least ({in_batch:,} bytes a step for the data, {in_agent:,} for the networks), but {available / _GIB:,.1f} GiB are available on "
            f"{loader.device}: use {advice}; batches_per_update adds up the gradients of several batches"
        )


def _available(device: torch.device) -> int | None:
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
