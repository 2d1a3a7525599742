"""A worker process: some actors, one socket to the learner, and the arrays that they share.

After the start every command is one byte and so is its answer; a few rare ones are followed by a message.

    0..9    step a group; no message          B    step all groups
    R       reset all actors                  D    statistics: message back
    S       state: message back               F/P  commit finished / all trajectories: message back
    L       load a state: message to it       Q    quit: message back (an error)
    !       (back) an environment was replaced: message
    X       (back) the worker cannot go on: message, and it exits
"""

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
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

import amago.envs.exploration  # noqa: F401  (registers its configurables before bindings arrive)
from amago import config
from amago.envs.pool.actors import Crew, CrewPlan
from amago.envs.pool.buffers import Buffers
from amago.envs.pool.faults import Fault
from amago.envs.recorder import RecordingError

MAX_GROUPS = 10
ALL_GROUPS = b"B"
GONE = (EOFError, BrokenPipeError, ConnectionResetError)
ORPHAN_SECONDS = 30.0


class _Quit(BaseException):
    """The learner has told to quit, and waits, while an environment is tried again and again."""


def pack(plan: CrewPlan) -> dict[str, Any]:
    """What a worker needs, for a process that has imported nothing.

    Functions and classes of ``__main__`` travel by value: the user's script is never run again.

    Raises:
        ValueError: something cannot be pickled; the message names it.
    """
    try:
        blob = cloudpickle.dumps(plan)
    except Exception as err:
        for i, maker in plan.make_envs.items():
            _try_pickle(f"make_envs[{i}] = {maker!r}", maker)
        _try_pickle(f"exploration = {plan.exploration!r}", plan.exploration)
        raise ValueError(f"the actors' settings cannot be sent to a worker process: {err}") from err
    return {"plan": blob, "gin": config.export_bindings(), "specs": _gym_specs()}


def _try_pickle(what: str, value: Any) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as err:
        raise ValueError(
            f"{what} cannot be sent to a worker process: {err}. Create what it refers to inside of it, "
            "or use env_mode='sync' or async_env_mp_context='fork'."
        ) from err


def _gym_specs() -> list[bytes]:
    """Environments that the program has registered, each pickled by itself; what cannot be pickled is left out."""
    out = []
    for spec in list(gym.registry.values()):
        entry = spec.entry_point
        if isinstance(entry, str) and entry.startswith("gymnasium."):
            continue
        with contextlib.suppress(Exception):
            if isinstance(entry, str) and entry.startswith("__main__:"):
                spec = _by_value(spec, entry)
            out.append(cloudpickle.dumps(spec))
    return out


def _by_value(spec: Any, entry: str) -> Any:
    value: Any = sys.modules["__main__"]
    for part in entry.partition(":")[2].split("."):
        value = getattr(value, part)
    spec = copy.copy(spec)
    spec.entry_point = value
    return spec


def unpack(payload: dict[str, Any]) -> CrewPlan:
    """The plan, after the process has been made ready for it: environments registered, parameters bound."""
    plan: CrewPlan = cloudpickle.loads(payload["plan"])
    config.import_bindings(payload["gin"])
    for blob in payload["specs"]:
        with contextlib.suppress(Exception):
            spec = cloudpickle.loads(blob)
            gym.registry.setdefault(spec.id, spec)
    return plan


def worker_main(conn: Connection, payload: dict[str, Any] | CrewPlan, foreign_fds: tuple[int, ...] = ()) -> None:
    """Run in a new process until told to quit, or until the learner is gone.

    Args:
        conn: this worker's end of its socket.
        payload: from `pack`; or, in a forked process, the plan itself.
        foreign_fds: descriptors that a fork has copied and that must not be kept open here.
    """
    # Those that stop a run are sent to its whole process group; the learner decides, and quits or kills its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for fd in foreign_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    threading.Thread(target=_end_orphan, args=(conn.fileno(),), name="amago-orphan", daemon=True).start()
    crew = None
    try:
        plan = payload if isinstance(payload, CrewPlan) else unpack(payload)
        words = plan.process_seed().generate_state(2)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))

        def report(fault: Fault) -> None:
            _answer(conn, b"!", fault)
            if b"Q" in _waiting(conn):
                raise _Quit

        crew = Crew(plan, report)
        _answer(conn, b"I", crew.spaces)
        layout = conn.recv()
        fd = reduction.recv_handle(conn)
        crew.attach(Buffers.attach(layout, fd))
        os.close(fd)
        _answer(conn, b"A")
        _serve(conn, crew)
    except _Quit:
        if crew is not None:
            _answer(conn, b"Q", _close(crew))
    except BaseException as err:
        with contextlib.suppress(*GONE):  # where the learner is gone, nobody is there to be told
            _answer(conn, b"X", (isinstance(err, RecordingError), traceback.format_exc()))
    finally:
        with contextlib.suppress(Exception):
            if crew is not None:
                crew.close()
        conn.close()


def _waiting(conn: Connection) -> bytes:
    """Commands that have come and have not been read."""
    with socket.socket(fileno=os.dup(conn.fileno())) as end:
        end.setblocking(True)
        try:
            return end.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


def _end_orphan(fd: int) -> None:
    """End this process if it has not ended by itself some time after the learner has gone: its environment hangs."""
    poll = select.poll()
    poll.register(fd, 0)  # nothing but the other end's closing
    poll.poll()
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(conn: Connection, byte: bytes, *message: Any) -> None:
    os.write(conn.fileno(), byte)
    for part in message:
        conn.send(part)


def _serve(conn: Connection, crew: Crew) -> None:
    fd = conn.fileno()
    steps = {b"%d" % g: g for g in range(MAX_GROUPS)}
    while True:
        command = os.read(fd, 1)
        group = steps.get(command)
        if group is not None:
            crew.step(group)
            os.write(fd, command)
        elif command == ALL_GROUPS:
            for group in range(len(crew.plan.groups)):
                crew.step(group)
            os.write(fd, command)
        elif command == b"R":
            crew.reset()
            _answer(conn, command)
        elif command == b"D":
            _answer(conn, command, crew.drain())
        elif command in (b"F", b"P"):
            _answer(conn, command, crew.flush(partial=command == b"P"))
        elif command == b"S":
            _answer(conn, command, crew.state_dict())
        elif command == b"L":
            crew.load_state_dict(conn.recv())
            _answer(conn, command)
        else:
            error = _close(crew)
            if command == b"Q":  # else the learner is gone
                _answer(conn, command, error)
            return


def _close(crew: Crew) -> str | None:
    try:
        crew.close()
    except Exception:
        return traceback.format_exc()
    return None
