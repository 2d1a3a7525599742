"""The ranks of a learner: processes that train one agent together (torchrun), and what they decide together.

Every rank must take part in each collective call, in the same order. Therefore a rank never acts upon a signal or a finding of its own:
it first tells the others, at points that all of them reach.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import time
import uuid
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from amago.run.signals import GracefulStop

T = TypeVar("T")
TIMEOUT = timedelta(hours=1)
"""How long a rank waits for the others in one call. The times that they take to collect may differ by so much."""
_BETWEEN_LOOKS = 0.25  # seconds
_learning = itertools.count()  # numbers the calls of learn(), equally in all ranks


def ranks_on_cpus() -> bool:
    """Whether this process is one of several (torchrun) on a machine without a GPU. Accelerate must be told: it would make each of them a run
    of its own."""
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return several and not (torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()))


def leave_at_exit() -> None:
    """Let this process leave the group of ranks before the interpreter ends, if the group communicates by gloo.

    PyTorch's threads for the group are otherwise ended with the process, which can abort it when all is done (SIGABRT). With NCCL, leaving
    may wait for ranks that have failed.
    """
    global _leaves
    if not _leaves:
        _leaves = True
        atexit.register(_leave)


_leaves = False


def _leave() -> None:
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


class RankLostError(RuntimeError):
    """Another rank has ended without a word: it failed, or was killed."""


class Ranks:
    """The processes that train together. In a run of one process nothing here communicates.

    Args:
        accelerator: of this rank; None: one process.

    Attributes:
        count: how many.
        index: of this one, from 0. Rank 0 writes the log and the checkpoints.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.count = 1 if accelerator is None else accelerator.num_processes
        self.index = 0 if accelerator is None else accelerator.process_index
        self._group: Any = None
        if self.count > 1 and dist.get_backend() != "gloo":  # numbers of the CPU, for which no GPU has to be waited for
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def gather(self, items: list[T]) -> list[T]:
        """The items of all ranks, rank 0's first."""
        return gather_object(items) if self.count > 1 else items  # type: ignore[no-any-return]

    def of_first(self, item: T) -> T:
        """The item of rank 0."""
        return self.gather([item])[0]

    def largest(self, number: int, while_waiting: Any = None) -> int:
        """The largest number of all ranks.

        Args:
            while_waiting: called now and then until all ranks are here. Signals are handled meanwhile.

        Raises:
            RankLostError: a rank has ended.
        """
        if self.count == 1:
            return number
        value, wait = torch.tensor([number]), 5e-5
        try:
            work = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            while not work.is_completed():
                time.sleep(wait)
                wait = min(2 * wait, 0.02)
                if while_waiting is not None:
                    while_waiting()
            work.wait()
        except RuntimeError as err:
            raise RankLostError(
                f"rank {self.index} has lost another of the {self.count} ranks, which failed or was killed (its own output says why); the "
                "run goes on from its last training state with resume='auto'"
            ) from err
        return int(value)

    def smallest(self, number: int) -> int:
        """The smallest number of all ranks."""
        return -self.largest(-number)

    def any(self, value: bool) -> bool:
        """Whether it is so in any rank."""
        return bool(self.largest(int(value)))

    def all(self, value: bool) -> bool:
        """Whether it is so in all ranks."""
        return not self.any(not value)

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Set tensors to those of rank 0."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def average(self, tensors: list[Tensor]) -> None:
        """Set tensors to their means over all ranks."""
        if self.count > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
                tensor /= self.count


class JointStop(GracefulStop):
    """A `GracefulStop` of several ranks, true once all of them have decided to stop.

    A signal to one rank reaches the others in two ways. At each `decide` all ranks learn of it. Between two of them, while ranks collect or
    evaluate each at its own pace, it is a key in the store through which the processes found each other, and `heard` looks for it.

    Attributes:
        requested: number of the first signal to this process.
        decided: number of the signal for which all ranks stop; None before.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.decided: int | None = None
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        self._run = ranks.of_first(uuid.uuid4().hex)  # a store may outlive the processes that it served
        self._key = ""
        self._told, self._next_look = False, 0.0

    def __bool__(self) -> bool:
        return self.decided is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.decided or 0)

    def decide(self) -> bool:
        """Whether to stop, equally in all ranks: whether a signal has reached any of them. All ranks must call this together."""
        if self.decided is None:
            self.decided = self.meet(self.requested or 0) or None
        return bool(self)

    def meet(self, number: int = 0) -> int:
        return self.ranks.largest(number, self._tell)

    def heard(self) -> bool:
        """Whether a signal is known to have reached any rank, which ends this rank's part of a phase early; `decide` follows."""
        if self._told or not self._key:
            return self.requested is not None
        now = time.monotonic()
        if self.requested is None and now >= self._next_look:
            self._next_look = now + _BETWEEN_LOOKS
            with contextlib.suppress(RuntimeError):  # the process with the store has ended: the next call of all ranks says so
                if self._store.check([self._key]):
                    self.requested = int(self._store.get(self._key))
                    self._told = True
        self._tell()
        return self.requested is not None

    def _tell(self) -> None:
        """Let the other ranks hear of a signal to this one."""
        if self.requested is None or self._told or not self._key:
            return
        self._told = True
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key, str(self.requested))

    def __enter__(self) -> JointStop:
        self.decided, self._told, self._key = None, False, f"amago/stop/{self._run}/{next(_learning)}"
        super().__enter__()
        return self
