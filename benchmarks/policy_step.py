"""Time of a policy's step: `get_actions` for 16 and 64 actors, width 256, 3 layers, short memories, one thread.

Every actor's rollouts last 16 steps and begin at different times, as in an asynchronous pool. Resets of memories are included.

The ceiling is the matrix products of the step: one per weight matrix of the encoders and the actor, by the faster of `torch.mm`
with a preallocated output and oneDNN's product with a prepacked weight; for a Transformer also the two batched products of
attention over 16 tokens, by `torch.bmm`. It leaves out biases, norms, activations, softmax, positions, writes to memories,
sampling, and Python.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from amago import config
from amago.agent import Agent
from amago.nets.traj_encoders import FFTrajEncoder, GRUTrajEncoder, TformerTrajEncoder, TrajEncoder
from amago.nets.tstep_encoders import CNNTstepEncoder, FFTstepEncoder
from amago.nets.utils import Linear
from amago.spaces import action_spec, rl2_space
from benchmarks.harness import Row, compare, seconds_per_call
from benchmarks.peer import peer_contenders

TRAJ: dict[str, type[TrajEncoder]] = {"FF": FFTrajEncoder, "GRU": GRUTrajEncoder, "Transformer": TformerTrajEncoder}
SIZES: dict[str, Any] = {"FFTrajEncoder.n_layers": 3, "GRUTrajEncoder.n_layers": 3, "TformerTrajEncoder.n_layers": 3}
TINY: dict[str, Any] = {
    "FFTrajEncoder.d_model": 16, "GRUTrajEncoder.d_hidden": 16, "GRUTrajEncoder.d_output": 16, "TformerTrajEncoder.d_model": 16,
    "TformerTrajEncoder.d_ff": 32, "TformerTrajEncoder.n_heads": 2, "FFTstepEncoder.d_hidden": 16, "FFTstepEncoder.d_output": 16,
    "CNNTstepEncoder.d_output": 16, "CNNTstepEncoder.img_features": 16, "Actor.d_hidden": 16, "NCritics.d_hidden": 16,
}  # fmt: skip
CARTPOLE_OBS = gym.spaces.Dict({"observation": gym.spaces.Box(-np.inf, np.inf, (4,))})
EPISODE = 16
TARGET = 0.4


def sizes(smoke: bool) -> dict[str, Any]:
    """The gin bindings of networks in the benchmarks of acting."""
    return SIZES | (TINY if smoke else {})


def make_agent(traj: str, context: int, smoke: bool, obs_space: gym.spaces.Dict = CARTPOLE_OBS, actions: int = 2) -> Agent:
    """An untrained agent in evaluation mode; ``traj`` is a key of `TRAJ`."""
    space: gym.Space[Any] = gym.spaces.Discrete(actions)
    image = any(len(s.shape or ()) == 3 for s in obs_space.spaces.values())
    encoder = CNNTstepEncoder if image else FFTstepEncoder
    with config.temporary(sizes(smoke)):
        return Agent(obs_space, rl2_space(action_spec(space)), space, context, encoder, TRAJ[traj]).eval()


def step_matrices(agent: Agent) -> list[Tensor]:
    """The weight matrices that a step of the policy uses."""
    parts: tuple[nn.Module, ...] = (agent.tstep_encoder, agent.traj_encoder, agent.actor)
    return [p.detach() for part in parts for p in part.parameters() if p.ndim == 2]


def products_alone(agent: Agent, actors: int, tokens: int) -> Callable[[], None]:
    """The ceiling, see this module."""
    products = [_fastest_product(weight, actors) for weight in step_matrices(agent)]
    attention = []
    if isinstance(agent.traj_encoder, TformerTrajEncoder):
        tformer = agent.traj_encoder.tformer
        rows, width = actors * tformer.n_heads, tformer.head_dim
        for _ in tformer.layers:
            q, k = torch.randn(rows, 1, width), torch.randn(rows, tokens, width)
            attention.append((q, k.mT, torch.empty(rows, 1, tokens)))
            attention.append((torch.randn(rows, 1, tokens), k, torch.empty(rows, 1, width)))

    def multiply() -> None:
        with torch.inference_mode():
            for product in products:
                product()
            for x, w, out in attention:
                torch.bmm(x, w, out=out)

    return multiply


def _fastest_product(weight: Tensor, actors: int) -> Callable[[], Any]:
    d_out, d_in = weight.shape
    x, out = torch.randn(actors, d_in), torch.empty(actors, d_out)
    packed = Linear(d_in, d_out, bias=False).eval()
    packed.load_state_dict({"weight": weight})
    ways: list[Callable[[], Any]] = [partial(torch.mm, x, weight.t(), out=out), partial(packed, x)]
    with torch.inference_mode():
        return min(ways, key=lambda way: min(seconds_per_call(way, 0.0, 5) for _ in range(8)))


class Acting:
    """Actors whose rollouts last ``episode`` steps and begin at different times; `step` is one step of the policy."""

    def __init__(self, agent: Agent, actors: int, episode: int = EPISODE):
        self.agent, self.actors, self.episode = agent, actors, episode
        self.memory = agent.init_hidden_state(actors, "cpu")
        self.obs = {
            k: torch.from_numpy(np.stack([s.sample() for _ in range(actors)])) for k, s in agent.obs_space.spaces.items()
        }
        self.rl2s = torch.zeros(actors, agent.rl2_space.shape[0])
        self.times = -(np.arange(actors) % episode)
        for _ in range(2 * episode):
            self.step()

    def step(self) -> Tensor:
        with torch.inference_mode():
            resets = (self.times <= 0) | (self.times >= self.episode)
            if resets.any():
                self.times[self.times >= self.episode] = 0
                self.memory = self.agent.reset_hidden_state(self.memory, resets)
            times = torch.from_numpy(np.maximum(self.times, 0)[:, None])
            actions, self.memory = self.agent.get_actions(self.obs, self.rl2s, times, self.memory)
            self.times += 1
        return actions


def milliseconds(work: Callable[[], Any], at_least: float) -> Callable[[], float]:
    """A contender that measures mean milliseconds per call of ``work``."""
    return lambda: 1e3 * seconds_per_call(work, at_least)


def _peer_case(traj: str, actors: int, seconds: float, smoke: bool) -> dict[str, Any]:
    env = {"env": "CartPole", "obs_shape": [4], "episode": EPISODE, "rl2_width": 3}
    return {"traj": traj, "context": 32, "actors": actors, "seconds": seconds, "bindings": sizes(smoke), **env}


def rows(options: Namespace) -> Iterator[Row]:
    """One row per sequence model and number of actors."""
    torch.manual_seed(0)
    at_least, rounds = (0.0, 1) if options.smoke else (0.25, options.rounds or 9)
    for traj in TRAJ:
        for actors in (4,) if options.smoke else (16, 64):
            case = f"{traj}, {actors} actors"
            if options.only not in case:
                continue
            agent = make_agent(traj, 32, options.smoke)
            acting, products = Acting(agent, actors), products_alone(agent, actors, EPISODE)
            contenders = {"ours": milliseconds(acting.step, at_least), "ceiling": milliseconds(products, at_least)}
            with peer_contenders(options, "policy_step", **_peer_case(traj, actors, at_least, options.smoke)) as peers:
                note = "target: at most 2.5 ms" if (traj, actors) == ("Transformer", 16) else ""
                yield compare(case, "ms", contenders | peers, rounds, TARGET, note=note)
