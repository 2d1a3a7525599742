"""One update (losses, backward pass, gradient clipping, AdamW, target networks) against the matrix products that it requires.

Sizes are the library's defaults: batch 24, a Transformer of width 256 with 3 layers, actor and critics of width 256, 4 critics,
7 discounts; observations are 20 floats.

The ceiling computes every matrix product of an update once, with its shape and dtype and with preallocated operands and
results: the forward product and those of the gradients that are needed (see `products`). It leaves out activations, norms,
softmax, dropout, losses, the optimizer and the target networks. Of causal attention half of the products are counted. Each
shape is timed separately by the fastest of three methods (matrix by matrix, batched, in pieces of 2,048 rows), times the number
of its occurrences.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from amago import config
from amago.agent import Agent, BaseAgent, MultiTaskAgent
from amago.loading import Batch
from amago.nets.traj_encoders import TformerTrajEncoder
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.run import learner as library
from amago.run.optimizer import adamw, lr_schedule
from amago.run.process import keep_freed_memory
from amago.spaces import action_spec, rl2_space
from benchmarks.harness import Row, compare
from benchmarks.peer import peer_contenders

TARGET = 0.75
TARGET_LENGTHS = (128, 512)


@dataclass(frozen=True)
class Case:
    """An agent and the size of its batches.

    Attributes:
        agent_type, action_space, length, bf16: these vary between cases.
        batch, width, d_obs, d_timestep, heads, layers, bins: these vary in smoke tests only.
    """

    agent_type: type[BaseAgent]
    action_space: gym.Space[Any]
    length: int
    bf16: bool
    batch: int = 24
    width: int = 256
    d_obs: int = 20
    d_timestep: int = 512
    heads: int = 8
    layers: int = 3
    bins: int = 128

    @property
    def name(self) -> str:
        n = getattr(self.action_space, "n", None)
        what = f"discrete ({n})" if n else f"continuous ({self.action_space.shape[0]}-D)"  # type: ignore[index]
        return f"{self.agent_type.__name__}, {what}, length {self.length}, {'bf16' if self.bf16 else 'float32'}"

    @property
    def bindings(self) -> dict[str, Any]:
        w = self.width
        return {
            "FFTstepEncoder.d_hidden": self.d_timestep, "FFTstepEncoder.d_output": w, "TformerTrajEncoder.d_model": w,
            "TformerTrajEncoder.d_ff": 4 * w, "TformerTrajEncoder.n_heads": self.heads, "TformerTrajEncoder.n_layers": self.layers,
            "Actor.d_hidden": w, "NCritics.d_hidden": w, "NCriticsTwoHot.d_hidden": w, "NCriticsTwoHot.output_bins": self.bins,
        }  # fmt: skip


SMOKE = {"batch": 2, "width": 16, "d_timestep": 32, "heads": 2, "layers": 1, "bins": 8}


def cases(smoke: bool) -> Iterator[Case]:
    """All cases by increasing length; float32 and bf16 alternate."""
    one, six = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Box(-1, 1, (6,))
    discrete: gym.Space[Any] = gym.spaces.Discrete(5)
    kinds: tuple[tuple[type[BaseAgent], gym.Space[Any]], ...] = (
        (Agent, discrete),
        (Agent, one),
        (Agent, six),
        (MultiTaskAgent, discrete),
        (MultiTaskAgent, six),
    )
    for length in (4,) if smoke else (32, 128, 512):
        for agent_type, space in kinds:
            if length == 512 and space is one:
                continue  # as fast as six dimensions, which is measured too
            for bf16 in (False, True):
                case = Case(agent_type, space, length, bf16)
                yield replace(case, **SMOKE) if smoke else case  # type: ignore[arg-type]


# ---- ours --------------------------------------------------------------------------------------------------------------


def make_agent(case: Case) -> BaseAgent:
    spec = action_spec(case.action_space)
    obs_space = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (case.d_obs,), np.float32)})
    with config.temporary(case.bindings):
        return case.agent_type(obs_space, rl2_space(spec), case.action_space, case.length, FFTstepEncoder, TformerTrajEncoder)


def make_batch(case: Case) -> Batch:
    """Random sequences without padding."""
    b, length, width = case.batch, case.length, action_spec(case.action_space).dim
    if isinstance(case.action_space, gym.spaces.Discrete):
        actions = torch.nn.functional.one_hot(torch.randint(width, (b, length)), width).float()
    else:
        actions = torch.rand(b, length, width) * 2.0 - 1.0
    return Batch(
        obs={"observation": torch.randn(b, length + 1, case.d_obs)},
        rl2s=torch.randn(b, length + 1, 1 + width),
        rews=torch.randn(b, length, 1),
        dones=torch.rand(b, length, 1) < 0.01,
        actions=actions,
        time_idxs=torch.arange(length + 1)[None, :, None].expand(b, -1, -1),
        mask=torch.ones(b, length + 1, 1, dtype=torch.bool),
    )


class Learner:
    """An agent, its optimizer and a batch; `update` does the work of an update of `amago.Experiment`."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16" if case.bf16 else "no")
        keep_freed_memory(True)  # as a run does
        self.prepare(make_agent(case))
        self.batch = make_batch(case)

    def prepare(self, agent: BaseAgent) -> None:
        self.agent, optimizer = self.accelerator.prepare(agent, adamw(list(agent.trainable_params), 1e-4, 1e-3))
        settings: Any = SimpleNamespace(grad_clip=1.0, ema_decay=0.0)
        self.learner = library.Learner(settings)
        self.learner.use(self.agent)
        self.learner.accelerator, self.learner.optimizer = self.accelerator, optimizer
        self.learner.lr_schedule = lr_schedule(optimizer, 10, 1000, 0.0)

    def update(self) -> None:
        with self.accelerator.autocast():
            total = self.agent(self.batch)
        self.accelerator.backward(total)
        self.learner.update(False, total.detach())

    def seconds(self) -> float:
        start = time.perf_counter()
        self.update()
        return time.perf_counter() - start


# ---- the ceiling -------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """``copies`` matrix products of shapes (m, k) and (k, n)."""

    copies: int
    m: int
    k: int
    n: int


def linear(
    rows: int, d_in: int, d_out: int, copies: int = 1, input_grad: bool = True, weight_grad: bool = True
) -> list[Product]:
    """The products of a linear layer: the forward pass, and the gradients of its input and its weight if requested."""
    out = [Product(copies, rows, d_in, d_out)]
    if input_grad:
        out.append(Product(copies, rows, d_out, d_in))
    if weight_grad:
        out.append(Product(copies, d_in, rows, d_out))
    return out


forward = partial(linear, input_grad=False, weight_grad=False)


def encoders(case: Case, rl2: int) -> list[Product]:
    """The products of the timestep encoder and the Transformer over length + 1 states, with all gradients."""
    w, rows = case.width, case.batch * (case.length + 1)
    out = linear(rows, case.d_obs + rl2, case.d_timestep, input_grad=False)  # observations need no gradient
    out += linear(rows, case.d_timestep, case.d_timestep) + linear(rows, case.d_timestep, w)
    out += linear(rows, w, w)  # the Transformer's input layer
    for _ in range(case.layers):
        out += linear(rows, w, 3 * w) + linear(rows, w, w)  # queries, keys and values; the attention's output layer
        out += linear(rows, w, 4 * w) + linear(rows, 4 * w, w)  # feed-forward
    return out


def attention(case: Case) -> list[Product]:
    """The products of attention without a causal mask: scores, weighted sums, and two gradients of each."""
    copies, length, head = case.batch * case.heads, case.length + 1, case.width // case.heads
    to_scores, from_scores = Product(copies, length, head, length), Product(copies, length, length, head)
    of_layer = [to_scores, from_scores] + [to_scores] + 3 * [from_scores]  # gradients: of weights; of values, queries, keys
    return case.layers * of_layer


def actor(rows: int, w: int, out: int, layer: Callable[..., list[Product]]) -> list[Product]:
    return layer(rows, w, w) + layer(rows, w, w) + layer(rows, w, out)


def critics(case: Case, agent: Any, rows: int) -> list[Product]:
    """The products of the critics: stored actions with all gradients, the policy's actions with the action's gradient only,
    targets.

    Targets draw ``num_critics_td`` critics with replacement; ``distinct`` is the expected number of different ones.
    """
    C, G, w = agent.critics.num_critics, len(agent.gammas), case.width
    distinct = C * (1.0 - (1.0 - 1.0 / C) ** agent.num_critics_td)
    drawn = max(1, round(distinct))
    if agent.exact:  # one pass gives the values of all discounts and actions, for both losses
        out = G * agent.action_spec.dim
        learned = linear(rows, w, w, C) + linear(rows, w, w, C) + linear(rows, w, out, C)
        return learned + forward(rows, w, w, drawn) + forward(rows, w, w, drawn) + forward(rows, w, out, drawn)
    width, out = agent.action_spec.dim, getattr(case, "bins", 1) if hasattr(agent.critics, "bins") else 1
    found = linear(rows, w, w, C)  # W_s s: once for all discounts and actions
    found += linear(rows, width, w, C, input_grad=False)  # W_a a of stored actions: once for all discounts
    found += linear(rows * G, w, w, C) + linear(rows * G, w, out, C)  # all other layers: once per discount
    samples = rows * G * agent.num_actions_for_value_in_actor_loss
    found += forward(samples, width, w, C) + forward(samples, w, w, C) + forward(samples, w, out, C)
    if agent.online_coeff > 0:  # the gradient of the action, through the smallest critic only
        found += [Product(1, samples, out, w), Product(1, samples, w, w), Product(1, samples, w, width)]
    samples = rows * G * agent.num_actions_for_value_in_critic_loss
    found += forward(rows, w, w, drawn) + forward(samples, width, w, drawn)
    return found + forward(samples, w, w, drawn) + forward(samples, w, out, drawn)


def products(case: Case, agent: Any) -> Counter[Product]:
    """All products of an update except those of attention, with their numbers of occurrences."""
    spec, w, rows = agent.action_spec, case.width, case.batch * case.length
    policy = agent.actor.d_output
    found = encoders(case, 1 + spec.dim)
    found += actor(rows, w, policy, linear) + actor(rows, w, policy, forward)  # the policy's, and the targets' actions
    return Counter(found + critics(case, agent, rows))


class Ceiling:
    """Times each product of an update separately, and adds the times up."""

    def __init__(self, case: Case, agent: Any) -> None:
        self.dtype = torch.bfloat16 if case.bf16 else torch.float32
        self.counts: dict[Product, float] = dict(products(case, agent))
        for p, times in Counter(attention(case)).items():
            self.counts[p] = self.counts.get(p, 0.0) + 0.5 * times  # causal
        self.ways = {p: self._fastest(p) for p in self.counts}

    @property
    def operations(self) -> float:
        return sum(2.0 * p.copies * p.m * p.k * p.n * times for p, times in self.counts.items())

    def _ways(self, p: Product) -> Iterator[Callable[[], Any]]:
        """Several methods for the same product, with preallocated memory."""
        a, b, out = (torch.rand(p.copies, *shape).to(self.dtype) for shape in ((p.m, p.k), (p.k, p.n), (p.m, p.n)))
        yield lambda: torch.bmm(a, b, out=out)
        if p.copies <= 8:
            yield lambda: [torch.mm(x, y, out=z) for x, y, z in zip(a, b, out)]
            if max(p.m, p.k) > 2048:
                yield partial(self._pieces, a, b, out)

    @staticmethod
    def _pieces(a: Tensor, b: Tensor, out: Tensor, step: int = 2048) -> None:
        for x, y, z in zip(a, b, out):
            if x.shape[0] > step:
                for i in range(0, x.shape[0], step):
                    torch.mm(x[i : i + step], y, out=z[i : i + step])
            else:
                for i in range(0, x.shape[1], step):
                    torch.addmm(z, x[:, i : i + step], y[i : i + step], beta=float(i > 0), out=z)

    def _fastest(self, p: Product) -> int:
        return min(enumerate(map(self._time, self._ways(p))), key=lambda pair: pair[1])[0]

    @staticmethod
    def _time(work: Callable[[], Any]) -> float:
        work()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def seconds(self) -> float:
        return sum(times * self._time(list(self._ways(p))[self.ways[p]]) for p, times in self.counts.items())


# ---- rows --------------------------------------------------------------------------------------------------------------


def _peer_case(case: Case) -> dict[str, Any]:
    n = getattr(case.action_space, "n", None)
    actions = {"choices": int(n)} if n else {"action_width": case.action_space.shape[0]}  # type: ignore[index]
    sizes = {
        "traj": "Transformer",
        "context": case.length,
        "episode": case.length,
        "batch": case.batch,
        "actors": min(8, case.batch),
    }
    about = {"env": "noise", "obs_shape": [case.d_obs], "agent": case.agent_type.__name__, "bf16": case.bf16, "seconds": 0.0}
    return {**sizes, **about, **actions, "bindings": case.bindings}


def rows(options: Namespace) -> Iterator[Row]:
    """One row per case."""
    for case in cases(options.smoke):
        if options.only not in case.name:
            continue
        learner = Learner(case)
        ceiling = Ceiling(case, learner.agent)
        learner.update()
        rounds = options.rounds or (1 if options.smoke else {32: 5, 128: 3}.get(case.length, 2))
        target = TARGET if case.length in TARGET_LENGTHS else None
        contenders = {"ours": learner.seconds, "ceiling": ceiling.seconds}
        note = f"{ceiling.operations / 1e9:.1f} billion operations"
        with peer_contenders(options, "learner", **_peer_case(case)) as peers:
            yield compare(case.name, "s", contenders | peers, rounds, target, note=note)
