"""Faster updates on a GPU: the compilation of an agent's loss (`amago.Experiment.compile`), and CUDA graphs of whole updates and of the
policy's steps (`cuda_graphs`).

Where either fails, computation goes on as without it."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amago.data.batch import Batch
from amago.nets.utils import read_by_graph

logger = logging.getLogger(__name__)
LENGTHS = 4


def combined() -> dict[str, Any]:
    """Options of the compiler on a GPU: small kernels side by side in one start, and more of them than by default, where this PyTorch can."""
    wanted, known = {"combo_kernels": True, "combo_kernel_max_num_nodes": 32}, torch._inductor.list_options()
    return {name: value for name, value in wanted.items() if name in known}


def bucket(length: int, longest: int) -> int:
    """The length to which sequences are padded: ``longest``, a half, a quarter or an eighth of it, so that few are compiled."""
    return next((n for n in (-(-longest // 2**k) for k in reversed(range(LENGTHS))) if n >= length), length)


def can_compile(device: torch.device) -> str:
    """The reason why ``compile="auto"`` does not compile on a device; "" where it does."""
    from torch.utils._triton import has_triton

    if device.type != "cuda":
        return "only on CUDA"
    return "" if has_triton() else "PyTorch finds no Triton for this GPU"


class CompiledLoss:
    """A function of batches, such as the loss of an agent, by ``torch.compile``. Steps whose metrics are logged, and batches drawn by
    priority, are computed eagerly.

    Sequences of each shape are tried first, forward and backward; if that fails, a line is logged and all is eager from then on. Over
    several ranks only the policy's `forward` is compiled, within the wrapper that averages gradients; sequences are padded to ``longest``,
    and tried in the first update alone: all ranks must send the same messages.

    Args:
        loss: ``loss(batch, log_step)``, which calls the policy.
        policy: its parameters have the gradients.
        longest: length of the longest sequences.
        ranks: the number of processes that train together.
    """

    def __init__(self, loss: Callable[[Batch, bool], Tensor], policy: nn.Module, longest: int, ranks: int = 1) -> None:
        self.eager, self.policy, self.longest, self.ranks, self.failed = loss, policy, longest, ranks, False
        self._tried: set[tuple[int, ...]] = set()
        options = combined() if next(policy.parameters()).is_cuda else None
        self._whole = torch.compile(loss if ranks == 1 else policy.forward, options=options)
        self._compiler: AbstractContextManager[Any] = nullcontext()
        if ranks > 1:  # what is compiled stays whole: by default the wrapper's buckets divide it, which scans cannot be
            from torch._dynamo import config

            self._compiler = config.patch(optimize_ddp=False)  # type: ignore[attr-defined]

    def __call__(self, batch: Batch, log_step: bool) -> Tensor:
        """``loss(batch, log_step)``."""
        if self.failed or log_step or batch.sources is not None:
            return self.eager(batch, log_step)
        padded = batch.lengthened(bucket(batch.rews.shape[1], self.longest) if self.ranks == 1 else self.longest)
        shape = tuple(padded.rews.shape[:2]) if self.ranks == 1 else ()
        with self._compiler:
            if shape not in self._tried:
                self._tried.add(shape)
                self.failed = self._fails(padded)
            if not self.failed:
                return self._compiled(padded, log_step)
        return self.eager(batch, log_step)

    def _compiled(self, batch: Batch, log_step: bool) -> Tensor:
        if self.ranks == 1:
            return self._whole(batch, log_step)  # type: ignore[no-any-return]
        own = vars(self.policy)
        before = own.get("forward")
        own["forward"] = self._whole
        try:
            return self.eager(batch, log_step)
        finally:
            own.pop("forward") if before is None else own.update(forward=before)

    def _fails(self, batch: Batch) -> bool:
        """Compile for a batch. The agent, gradients and random numbers stay as they are."""
        from torch._dynamo.utils import counters

        parameters = list(self.policy.parameters())  # which rescale_critics changes in the loss, with their gradients
        kept = [*self.policy.buffers(), *parameters, *(p.grad for p in parameters if p.grad is not None)]
        values = [x.detach().clone() for x in kept]
        breaks, devices = set(counters["graph_break"]), [batch.rews.device] if batch.rews.is_cuda else []
        try:
            with torch.random.fork_rng(devices):
                trained = [p for p in parameters if p.requires_grad]
                torch.autograd.grad(self._whole(batch, False), trained, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as err:
            line = f"{type(err).__name__}: {err}".splitlines()[0]
            logger.warning("the loss is computed without compilation, which has failed (compile=False is silent): %s", line)
            if self.ranks > 1:
                self.policy(batch, False)  # sends the messages that the other ranks' trials wait for
            return True
        finally:
            with torch.no_grad():
                torch._foreach_copy_(kept, values)
        if new := set(counters["graph_break"]) - breaks:
            logger.warning("parts of the loss run without compilation: %s", min(new).splitlines()[0])
        return False


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------------

WARM_UP = 3
"""Calls before one is captured: libraries and compilers prepare themselves in the first ones."""
Update = Callable[[Batch], dict[str, Any]]
OfTensors = Callable[[list[Tensor]], Any]


class Graphs:
    """Calls of a function of tensors as CUDA graphs, one for each key.

    The first calls of a key are ordinary ones. If a capture fails, a line is logged, and all calls are ordinary ones from then on; a function
    that was interrupted must be able to begin again.

    Args:
        calls: their name in that line.

    Attributes:
        failed: a capture has failed.
    """

    def __init__(self, calls: str) -> None:
        self.calls, self.failed = calls, False
        self._made: dict[Hashable, _Graph] = {}
        self._ordinary: Counter[Hashable] = Counter()
        self._states: dict[Hashable, object] = {}

    def __call__(self, key: Hashable, function: OfTensors, given: list[Tensor], state: object = None) -> Any:
        """``function(given)``, or the replay of a captured call: its tensors are new, other values those of the capture. Tensors of a key have
        always the same shapes. Where ``state`` is not what it was, this call is an ordinary one, and the next is captured again."""
        if self.failed:
            return on_a_side_stream(function, given)
        if self._states.setdefault(key, state) != state:
            self._states[key], self._ordinary[key] = state, min(self._ordinary[key], WARM_UP - 1)
            self._made.pop(key, None)
        if self._ordinary[key] < WARM_UP:
            self._ordinary[key] += 1
            return on_a_side_stream(function, given)
        if key not in self._made:
            try:
                with _restored_if_it_fails():
                    self._made[key] = _Graph(function, given)
            except torch.OutOfMemoryError:
                raise
            except Exception as err:
                self.failed = True
                line = f"{type(err).__name__}: {err}".splitlines()[0]
                logger.warning("%s are not replayed as CUDA graphs, since a capture has failed: %s", self.calls, line)
                return on_a_side_stream(function, given)
        return self._made[key](given)


class _Graph:
    """A captured call of a function of tensors."""

    def __init__(self, function: OfTensors, given: list[Tensor]) -> None:
        self._given, self._graph = [x.clone() for x in given], torch.cuda.CUDAGraph()
        read_by_graph.clear()
        # thread_local: a loader's threads go on
        with torch.cuda.graph(self._graph, stream=_side_stream(), capture_error_mode="thread_local"):
            self._result = function(self._given)
        self._read = read_by_graph[:]  # also where their cache is cleared meanwhile

    def __call__(self, given: list[Tensor]) -> Any:
        torch._foreach_copy_(self._given, given)
        self._graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self._result)


class UpdateGraphs:
    """Updates as CUDA graphs, one for each shape of batches (`Graphs`).

    Args:
        longest: length of the longest sequences; shorter ones are padded to it, or to a half, a quarter or an eighth.
        clear: removes gradients, as a capture that has failed leaves them.
    """

    def __init__(self, longest: int, clear: Callable[[], object]) -> None:
        self._longest, self._clear, self._graphs = longest, clear, Graphs("updates")

    def __call__(self, update: Update, batch: Batch) -> dict[str, Any]:
        """``update(batch)``, or its replay."""
        batch = batch.lengthened(bucket(batch.rews.shape[1], self._longest))

        def update_with(tensors: list[Tensor]) -> dict[str, Any]:
            rest = iter(tensors)
            self._clear()
            return update(copy.copy(batch).map(lambda _: next(rest)))

        return self._graphs(tuple(batch.rews.shape[:2]), update_with, batch.tensors())  # type: ignore[no-any-return]


def _side_stream() -> torch.cuda.Stream:
    return _stream_of(torch.cuda.current_device())


@cache
def _stream_of(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on_a_side_stream(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, on the stream of all captures: the graph of autograd keeps the stream of each parameter, and one that outlives its
    update (by a reference to a loss, say) must not bring the main stream into a capture."""
    present, side = torch.cuda.current_stream(), _side_stream()
    side.wait_stream(present)
    try:
        with torch.cuda.stream(side):
            return function(*args)
    finally:
        present.wait_stream(side)


@contextmanager
def _restored_if_it_fails() -> Iterator[None]:
    """A capture that fails leaves its stream as the present one, and a generator of random numbers that only a capture may use."""
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):  # whose end restores the stream
            yield
    except Exception:
        for generator in torch.cuda.default_generators:
            generator.graphsafe_set_state(generator.clone_state())
        raise
