"""The worker's side: a process that hosts some actors and answers the learner's commands (`amago.envs.pool.protocol`)."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

import amago.envs.exploration  # noqa: F401  (registers its configurables before bindings arrive)
from amago import config
from amago.envs.pool import protocol
from amago.envs.pool.actor_set import ActorSet
from amago.envs.pool.buffers import Buffers
from amago.envs.pool.faults import EnvironmentMistake, Fault
from amago.envs.pool.pickling import dumps
from amago.envs.pool.plan import ActorPlan
from amago.envs.recorder import RecordingError

_OF_LEARNERS = ("amago.agent.", "amago.experiment.", "amago.loading.", "amago.nets.", "amago.run.")
"""Modules whose classes no worker uses, though an environment's file may import them."""
_DISCONNECTED = (EOFError, BrokenPipeError, ConnectionResetError)
ORPHAN_SECONDS = 30.0  # how long a worker whose learner is gone may take to end by itself


class _QuitRequested(BaseException):
    """The learner asked this worker to quit while it was replacing an environment."""


def pack(plan: ActorPlan) -> dict[str, Any]:
    """The plan, gin bindings and registered environments, for a process that has imported nothing.

    Functions and classes of ``__main__`` are pickled by value, so that the worker need not run the user's script.

    Raises:
        ValueError: something cannot be pickled; the message names it.
    """
    try:
        blob = dumps(plan)
    except Exception as err:
        for i, maker in plan.make_envs.items():
            _try_pickle(f"make_envs[{i}] = {maker!r}", maker)
        _try_pickle(f"exploration = {plan.exploration!r}", plan.exploration)
        raise ValueError(f"the actors' settings cannot be sent to a worker process: {err}") from err
    return {"plan": blob, "gin": config.export_bindings(), "specs": _gym_specs()}


def _try_pickle(what: str, value: Any) -> None:
    try:
        dumps(value)
    except Exception as err:
        raise ValueError(
            f"{what} cannot be sent to a worker process: {err}. Create what it refers to inside of it, "
            "or use env_mode='sync' or async_env_mp_context='fork'."
        ) from err


def _gym_specs() -> list[bytes]:
    """The environments in Gymnasium's registry that are not its own, each pickled by itself; those that cannot be are left out."""
    out = []
    for spec in list(gym.registry.values()):
        entry = spec.entry_point
        if isinstance(entry, str) and entry.startswith("gymnasium."):
            continue
        with contextlib.suppress(Exception):
            if isinstance(entry, str) and entry.startswith("__main__:"):
                spec = _by_value(spec, entry)
            out.append(dumps(spec))
    return out


def _by_value(spec: Any, entry: str) -> Any:
    """The spec with the class or function of ``__main__`` itself in place of its name, which means nothing in a worker."""
    value: Any = sys.modules["__main__"]
    for part in entry.partition(":")[2].split("."):
        value = getattr(value, part)
    spec = copy.copy(spec)
    spec.entry_point = value
    return spec


def unpack(payload: dict[str, Any]) -> tuple[ActorPlan, list[config.Binding]]:
    """The plan, after registering the environments and binding the parameters that it needs; and the bindings that were skipped."""
    plan: ActorPlan = cloudpickle.loads(payload["plan"])
    skipped = config.import_bindings(payload["gin"])
    for blob in payload["specs"]:
        with contextlib.suppress(Exception):
            spec = cloudpickle.loads(blob)
            gym.registry.setdefault(spec.id, spec)
    return plan, skipped


def worker_main(conn: Connection, payload: dict[str, Any] | ActorPlan, inherited_fds: tuple[int, ...] = ()) -> None:
    """Run in a new process until told to quit, or until the learner is gone.

    Args:
        conn: this worker's end of its socket.
        payload: from `pack`; in a forked process, the plan itself.
        inherited_fds: descriptors that a fork has copied and that must be closed here.
    """
    # A signal that stops a run is sent to its whole process group; the learner handles it, then tells its workers to quit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for fd in inherited_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    threading.Thread(target=_kill_orphan, args=(conn.fileno(),), name="amago-orphan", daemon=True).start()
    actors = None
    try:
        plan, skipped = (payload, []) if isinstance(payload, ActorPlan) else unpack(payload)

        def report(fault: Fault) -> None:
            _answer(conn, protocol.FAULT, fault)
            if protocol.QUIT in _unread_commands(conn):
                raise _QuitRequested

        actors = _make_actors(plan, skipped, report)
        _answer(conn, protocol.READY, actors.spaces)
        layout = conn.recv()
        fd = reduction.recv_handle(conn)
        actors.attach(Buffers.attach(layout, fd))
        os.close(fd)
        _answer(conn, protocol.ATTACHED)
        _serve(conn, actors)
    except _QuitRequested:
        if actors is not None:
            _answer(conn, protocol.QUIT, _close(actors))
    except BaseException as err:
        with contextlib.suppress(*_DISCONNECTED):
            text = str(err) if isinstance(err, EnvironmentMistake) else traceback.format_exc()
            _answer(conn, protocol.FAILED, (type(err) if isinstance(err, (RecordingError, EnvironmentMistake)) else None, text))
    finally:
        with contextlib.suppress(Exception):
            if actors is not None:
                actors.close()
        conn.close()


def _make_actors(plan: ActorPlan, skipped: list[config.Binding], report: Callable[[Fault], None]) -> ActorSet:
    """The actors of a plan, made with the bindings that were ``skipped`` if making them has imported what those configure."""
    _seed_process(plan)
    actors = ActorSet(plan, report)
    late = [b for b in skipped if not b[1].startswith(_OF_LEARNERS)]
    if len(config.import_bindings(late)) == len(late):
        return actors
    actors.close()
    _seed_process(plan)
    return ActorSet(plan, report)


def _seed_process(plan: ActorPlan) -> None:
    """Seed the global random generators, for environments that use them."""
    seeds = plan.process_seed().generate_state(2)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))


def _unread_commands(conn: Connection) -> bytes:
    """Commands that have arrived and were not read yet, up to 64."""
    with socket.socket(fileno=os.dup(conn.fileno())) as end:
        end.setblocking(True)
        try:
            return end.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


def _kill_orphan(fd: int) -> None:
    """Kill this process if it is still there some time after the learner's end: then its environment hangs."""
    poll = select.poll()
    poll.register(fd, 0)  # no events but the closing of the other end
    poll.poll()
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(conn: Connection, command: bytes, *message: Any) -> None:
    os.write(conn.fileno(), command)
    for part in message:
        conn.send(part)


def _serve(conn: Connection, actors: ActorSet) -> None:
    """Answer commands until `protocol.QUIT`, or until the learner has closed its end."""
    fd = conn.fileno()
    step_group, step_all = {command: group for group, command in enumerate(protocol.STEP_GROUP)}, protocol.STEP_ALL
    while True:
        command = os.read(fd, 1)
        group = step_group.get(command)
        if group is not None:
            actors.step(group)
            os.write(fd, command)
        elif command == step_all:
            for group in range(len(actors.plan.groups)):
                actors.step(group)
            os.write(fd, command)
        elif command == protocol.QUIT:
            _answer(conn, command, _close(actors))
            return
        elif not command:  # the learner is gone; `worker_main` closes the actors
            return
        else:
            _answer(conn, command, *_obey(command, conn, actors))


def _obey(command: bytes, conn: Connection, actors: ActorSet) -> tuple[Any, ...]:
    """Carry out one of the rarer commands; returns the message of the answer, if it has one."""
    if command == protocol.RESET:
        actors.reset()
        return ()
    if command == protocol.DRAIN:
        return (actors.drain(),)
    if command in (protocol.FLUSH, protocol.FLUSH_PARTIAL):
        return (actors.flush(partial=command == protocol.FLUSH_PARTIAL),)
    if command == protocol.GET_STATE:
        return (actors.state_dict(),)
    if command == protocol.CALL:
        name, args, kwargs = conn.recv()
        return (actors.call(name, args, kwargs, check=reduction.ForkingPickler.dumps),)
    if command == protocol.SET_STATE:
        actors.load_state_dict(conn.recv())
        return ()
    raise ValueError(f"unknown command {command!r}")


def _close(actors: ActorSet) -> str | None:
    """Close the actors; returns the traceback if trajectories could not be committed."""
    try:
        actors.close()
    except Exception:
        return traceback.format_exc()
    return None
