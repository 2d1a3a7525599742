"""Environment steps per second of a policy in a pool of actors (`Rollout`).

The ceiling of "async" is the slower of its two parts: the environments alone (the same pool with given actions) and the policy
alone (all actors in one call). The ceiling of "sync" is one after the other. Ceilings leave out the loop that joins the parts,
and the transfer of arrays. The ceiling of "async" cannot be reached if workers use every core, because the policy then competes
with them. Rows of "async" note their speed relative to "sync".

"environments alone" compares the pool with the same number of processes that step bare environments without communication (the
ceiling), and with Gymnasium's `AsyncVectorEnv` (the peer), which should be at least four times slower. "recorded" is the
collection of training data, with exploration and "segments" (the default), against the ceiling of a rollout
without them; a ``--peer`` does the same work.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from amago.envs import AMAGOEnv, make_pool
from amago.envs.exploration import EpsilonGreedy
from amago.envs.pool import ActorPool
from amago.run.rollout import Rollout
from benchmarks.harness import Row, compare
from benchmarks.peer import peer_contenders
from benchmarks.policy_step import Acting, make_agent, sizes

TARGET, TARGET_TO_GYMNASIUM = 0.8, 4.0
MODELS = {"FF": ("FF", 32), "GRU": ("GRU", 32), "Transformer 32": ("Transformer", 32), "Transformer 512": ("Transformer", 512)}


class Images(gym.Env[Any, Any]):
    """Returns stored random images, uint8 (64, 64, 3), so that a step costs almost nothing. Rollouts last 64 steps."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)
    episode = 64

    def __init__(self) -> None:
        self._bank = np.random.default_rng(0).integers(0, 256, (16, 64, 64, 3), dtype=np.uint8)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return self._bank[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._bank[self._t % 16], float(action), self._t == self.episode, False, {}


def _cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


ENVS: dict[str, tuple[Callable[[], Any], int]] = {"CartPole": (_cartpole, 22), "images": (Images, Images.episode)}
"""A function that makes the environment, and the mean length of rollouts of an untrained policy, by name."""


def _wrapped(env: str) -> AMAGOEnv:
    return AMAGOEnv(ENVS[env][0](), env_name=env)


def rollout_speed(pool: ActorPool, rollout: Rollout, agent: Any, seconds: float) -> float:
    """Environment steps per second of the policy in the pool."""
    start = time.perf_counter()
    taken = rollout.run(agent, 1 << 40, should_stop=lambda: time.perf_counter() - start >= seconds)
    return taken * pool.num_actors / (time.perf_counter() - start)


def environments_speed(pool: ActorPool, seconds: float) -> float:
    """Environment steps per second of the pool with given actions."""
    actions = np.zeros((pool.num_actors, pool.action_spec.stored_dim), pool.action_spec.stored_dtype)
    actions[::2] = 1
    steps, start = 0, time.perf_counter()
    while steps == 0 or time.perf_counter() - start < seconds:
        pool.step(actions)
        steps += 1
    return steps * pool.num_actors / (time.perf_counter() - start)


def policy_speed(acting: Acting, seconds: float) -> float:
    """Environment steps per second of a policy whose environments take no time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a `Rollout`
    steps, start = 0, time.perf_counter()
    while steps == 0 or time.perf_counter() - start < seconds:
        acting.step()
        steps += 1
    speed = steps * acting.actors / (time.perf_counter() - start)
    torch.set_num_threads(before)
    return speed


def _both(figures: Mapping[str, float]) -> float:
    return 1.0 / (1.0 / figures["environments"] + 1.0 / figures["policy"])


def _slower(figures: Mapping[str, float]) -> float:
    return min(figures["environments"], figures["policy"])


@contextmanager
def _open(env: str, mode: str, actors: int, **options: Any) -> Iterator[ActorPool]:
    pool = make_pool([partial(_wrapped, env)] * actors, mode, seed=0, **options)
    try:
        pool.reset()
        yield pool
    finally:
        pool.close()


def _loops(
    options: Namespace, env: str, actors: int, seconds: float, rounds: int, wanted: Callable[[str], bool]
) -> Iterator[Row]:
    """The rows of all policies and modes for one environment and number of actors."""
    cases = {(model, mode): f"{env}, {model}, {mode}, {actors} actors" for model in MODELS for mode in ("sync", "async")}
    cases = {key: case for key, case in cases.items() if wanted(case)}
    if not cases:
        return
    with _open(env, "sync", actors) as sync, _open(env, "async", actors) as concurrent:
        pools = {"sync": sync, "async": concurrent}
        for (model, mode), case in cases.items():
            traj, context = MODELS[model]
            pool, agent = pools[mode], make_agent(traj, context, options.smoke, sync.observation_space)
            acting = Acting(agent, actors, ENVS[env][1])
            speeds = {name: partial(rollout_speed, p, Rollout(p), agent, seconds) for name, p in pools.items()}
            contenders = {
                "ours": speeds[mode],
                "environments": partial(environments_speed, pool, seconds),
                "policy": partial(policy_speed, acting, seconds),
            }
            for speed in speeds.values():
                speed()  # warm-up
            if mode == "async":
                contenders["sync"] = speeds["sync"]
            row = compare(case, "steps/s", contenders, rounds, TARGET, _slower if mode == "async" else _both)
            yield row if mode == "sync" else replace(row, note=f"{row.ours / row.details['sync']:.2f} x sync")


# ---- environments alone ---------------------------------------------------------------------------------------------------


def _step_bare(conn: Connection, env: str, number: int) -> None:
    """The body of a worker process: for each number of seconds received, step bare environments and send steps per second."""
    envs = [ENVS[env][0]() for _ in range(number)]
    for each in envs:
        each.reset()
    conn.send("ready")
    while True:
        try:
            seconds = conn.recv()
        except EOFError:
            return
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for i, each in enumerate(envs):
                _, _, terminated, truncated, _ = each.step(i % 2)
                if terminated or truncated:
                    each.reset()
                steps += 1
        conn.send(steps / (time.perf_counter() - start))


class Bare:
    """The ceiling of environments alone: processes that each step a part of the environments and do nothing else."""

    def __init__(self, env: str, actors: int, workers: int):
        context = mp.get_context("forkserver")
        self._workers = []
        for i in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_step_bare, args=(there, env, len(range(i, actors, workers))), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        for _, conn in self._workers:
            conn.recv()

    def __call__(self, seconds: float) -> float:
        for _, conn in self._workers:
            conn.send(seconds)
        return float(sum(conn.recv() for _, conn in self._workers))

    def close(self) -> None:
        for process, conn in self._workers:
            conn.close()
            process.join()


def _gymnasium_speed(vector: gym.vector.AsyncVectorEnv, seconds: float) -> float:
    actions = np.arange(vector.num_envs) % 2
    steps, start = 0, time.perf_counter()
    while steps == 0 or time.perf_counter() - start < seconds:
        vector.step(actions)
        steps += 1
    return steps * vector.num_envs / (time.perf_counter() - start)


def _environments_alone(pool: ActorPool, env: str, seconds: float, rounds: int, case: str) -> Row:
    actors = pool.num_actors
    with ExitStack() as stack:
        workers = len(pool._workers)  # type: ignore[attr-defined]
        bare = Bare(env, actors, workers)
        stack.callback(bare.close)
        vector = gym.vector.AsyncVectorEnv([ENVS[env][0]] * actors)
        stack.callback(vector.close)
        vector.reset(seed=0)
        contenders = {
            "ours": partial(environments_speed, pool, seconds),
            "ceiling": partial(bare, max(seconds, 0.05)),
            "peer": partial(_gymnasium_speed, vector, seconds),
        }
        return compare(case, "steps/s", contenders, rounds, note=f"peer: AsyncVectorEnv; target {TARGET_TO_GYMNASIUM:.0f} x")


def _recorded(options: Namespace, plain: ActorPool, env: str, traj: str, seconds: float, rounds: int, case: str) -> Row:
    actors = plain.num_actors
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        recorder = {"save_trajs_to": folder, "save_trajs_as": "segments"}
        pool = stack.enter_context(_open(env, "async", actors, exploration=EpsilonGreedy, recorder=recorder))
        agent, rollout = make_agent(traj, 32, options.smoke, pool.observation_space), Rollout(pool)

        def collect() -> float:
            """Environment steps per second of collecting training data, until all files are written."""
            start = time.perf_counter()
            taken = rollout.run(agent, 1 << 40, should_stop=lambda: time.perf_counter() - start >= seconds)
            pool.flush()
            return taken * actors / (time.perf_counter() - start)

        contenders: dict[str, Callable[[], float]] = {
            "ours": collect,
            "environments": partial(environments_speed, plain, seconds),
            "policy": partial(policy_speed, Acting(agent, actors, ENVS[env][1]), seconds),
        }
        collect()
        peer = {
            "traj": traj, "context": 32, "actors": actors, "seconds": seconds, "bindings": sizes(options.smoke), "mode": "async",
            "env": "CartPole" if env == "CartPole" else "noise", "obs_shape": list(pool.obs["observation"].shape[1:]),
            "episode": ENVS[env][1], "choices": 2,
        }  # fmt: skip
        contenders |= stack.enter_context(peer_contenders(options, "rollout", **peer))
        return compare(case, "steps/s", contenders, rounds, None, _slower)


def rows(options: Namespace) -> Iterator[Row]:
    """Environments alone, then together with each policy."""
    torch.manual_seed(0)
    seconds, rounds = (0.0, 1) if options.smoke else (0.3, options.rounds or 3)
    numbers = (4,) if options.smoke else (8, 16, 32)

    def wanted(case: str) -> bool:
        return options.only in case

    middle = numbers[len(numbers) // 2]
    for env in ENVS:
        alone = f"{env}, environments alone, async, {middle} actors"
        recorded = {
            traj: f"{env}, {traj}, recorded, async, {middle} actors"
            for traj in (("Transformer",) if options.smoke else ("FF", "Transformer"))
        }
        if any(map(wanted, (alone, *recorded.values()))):
            with _open(env, "async", middle) as pool:
                if wanted(alone):
                    yield _environments_alone(pool, env, max(seconds, 0.05), rounds, alone)
                for traj, case in recorded.items():
                    if wanted(case):
                        yield _recorded(options, pool, env, traj, seconds, rounds, case)
    for env in ENVS:
        for actors in numbers:
            yield from _loops(options, env, actors, seconds, rounds, wanted)
