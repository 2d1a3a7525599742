"""A worker process, which hosts some actors of a pool and answers the learner's commands.

The learner holds one `amago.envs.pool.subprocess.WorkerHandle` a worker. Both share a socket, and the arrays of
`amago.envs.pool.memory`, which hold observations and actions. A command is one byte; the answer is the same byte. Rare ones are
followed by a pickled message.

A worker starts by itself: it makes its environments, answers `READY` with their spaces, receives the layout of the arrays and
the file descriptor of their memory, and answers `ATTACHED`. From then on it answers commands in the order of their arrival:

| command | the worker | message to it | message back |
| --- | --- | --- | --- |
| `STEP_GROUP[g]` | steps the actors of group g | | |
| `ASK` | calls a method of its `ActorSet` | (number, its name, arguments) | (number, its result) |
| `QUIT` | closes everything and ends | | a traceback, or None |

Two messages come without a command: `FAULT`, when an environment was replaced (with a `Fault`), and `FAILED`, when the worker
cannot go on (with the class of an error that ends the run, or None, and a text), after which it ends.
"""

from __future__ import annotations

import contextlib
import copy
import io
import operator
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gin
import gymnasium as gym
import numpy as np

import amago.envs.exploration  # noqa: F401  (registers its configurables before bindings arrive)
from amago import config, system
from amago.envs.pool.base import ActorPlan
from amago.envs.pool.faults import EnvironmentMistake, Fault
from amago.envs.pool.memory import Buffers
from amago.envs.pool.sync import ActorSet
from amago.envs.recorder import RecordingError

READY, ATTACHED = b"R", b"B"
STEP_GROUP = tuple(b"%d" % group for group in range(10))
ASK = b"A"
QUIT = b"Q"
FAULT, FAILED = b"!", b"X"


_OF_LEARNERS = ("amago.agent.", "amago.experiment.", "amago.loading.", "amago.nets.", "amago.run.")
"""Modules whose classes no worker uses, though an environment's file may import them."""
_DISCONNECTED = (EOFError, BrokenPipeError, ConnectionResetError)
ORPHAN_SECONDS = 30.0  # how long a worker whose learner is gone may take to end by itself


Payload = tuple[bytes, list[config.Binding], list[bytes]]
"""The plan, gin bindings and registered environments, the first and the last pickled."""


class _QuitRequested(BaseException):
    """Raised when the learner sends `QUIT` while this worker replaces an environment."""


def dumps(value: object) -> bytes:
    """Like ``cloudpickle.dumps``, but configurables of ``__main__`` are registered with gin where they are unpickled."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        selector = _selector(obj)
        if selector is not None and obj.__module__ == "__main__":
            return _configurable, (obj.__wrapped__, selector)
        return super().reducer_override(obj)


def _selector(obj: object) -> str | None:
    """The full name under which gin binds the arguments of a function that it has wrapped; None for other objects."""
    if not isinstance(obj, types.FunctionType) or not hasattr(obj, "__wrapped__") or obj.__code__.co_name != "gin_wrapper":
        return None
    cells = dict(zip(obj.__code__.co_freevars, obj.__closure__ or ()))
    return str(cells["selector"].cell_contents) if "selector" in cells else None


def _configurable(function: Callable[..., Any], selector: str) -> Callable[..., Any]:
    """Wrap a function, or the constructor of a class, as gin did."""
    module, _, name = selector.rpartition(".")
    with gin.config.interactive_mode():  # another environment of this worker may have brought it
        return gin.external_configurable(function, name=name, module=module or None)  # type: ignore[no-any-return]


def pack(plan: ActorPlan) -> Payload:
    """The plan, gin bindings and registered environments, for a process that has imported nothing.

    Functions and classes of ``__main__`` are pickled by value, so that the worker need not run the user's script. ValueError
    names what cannot be pickled.
    """
    try:
        blob = dumps(plan)
    except Exception as err:
        for i, maker in plan.make_envs.items():
            _try_pickle(f"make_envs[{i}] = {maker!r}", maker)
        _try_pickle(f"exploration = {plan.exploration!r}", plan.exploration)
        raise ValueError(f"the actors' settings cannot be sent to a worker process: {err}") from err
    return blob, config.export_bindings(dumps), _gym_specs()


_starting = threading.Lock()


def _new_lock() -> None:
    """Forget, after a fork, a lock that one of the parent's threads may have held."""
    global _starting
    _starting = threading.Lock()


system.after_fork_in_child(_new_lock)


@contextlib.contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in the child: `pack` sends what is needed by value."""
    main = sys.modules["__main__"].__dict__
    with _starting:  # two threads at once would save each other's hidden state
        saved: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
        main["__spec__"] = None
        main.pop("__file__", None)
        try:
            yield
        finally:
            main.update(saved)


def _try_pickle(what: str, value: object) -> None:
    try:
        dumps(value)
    except Exception as err:
        raise ValueError(
            f"{what} cannot be sent to a worker process: {err}. Create what it refers to inside of it, "
            "or use env_mode='sync' or async_env_mp_context='fork'."
        ) from err


def _gym_specs() -> list[bytes]:
    """The environments in Gymnasium's registry that are not its own and can be pickled."""
    out = []
    for spec in list(gym.registry.values()):
        entry = spec.entry_point
        if isinstance(entry, str) and entry.startswith("gymnasium."):
            continue
        with contextlib.suppress(Exception):
            if isinstance(entry, str) and entry.startswith("__main__:"):  # by value: the name means nothing in a worker
                spec = copy.copy(spec)
                spec.entry_point = operator.attrgetter(entry.partition(":")[2])(sys.modules["__main__"])
            out.append(dumps(spec))
    return out


def unpack(payload: Payload) -> tuple[ActorPlan, list[config.Binding]]:
    """The plan, after registering the environments and binding the parameters that it needs; and the skipped bindings."""
    blob, bindings, specs = payload
    plan: ActorPlan = cloudpickle.loads(blob)
    skipped = config.import_bindings(bindings)
    for packed in specs:
        with contextlib.suppress(Exception):
            spec = cloudpickle.loads(packed)
            gym.registry.setdefault(spec.id, spec)
    return plan, skipped


def worker_main(conn: Connection, payload: Payload | ActorPlan, inherited_fds: tuple[int, ...] = ()) -> None:
    """Run in a new process until `QUIT` arrives, or until the learner is gone.

    Args:
        conn: this worker's end of its socket.
        payload: from `pack`; in a forked process, the plan itself.
        inherited_fds: descriptors that a fork has copied and that must be closed here.
    """
    # A signal that stops a run is sent to its whole process group; the learner handles it, then sends `QUIT` to its workers.
    for number in system.signals("SIGINT", "SIGTERM", "SIGUSR1"):
        signal.signal(number, signal.SIG_IGN)
    for fd in inherited_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    threading.Thread(target=_kill_orphan, args=(conn.fileno(),), name="amago-orphan", daemon=True).start()
    # so that the end of this process closes the socket, even if an environment's own processes go on
    system.after_fork_in_child(conn.close)
    actors = None
    try:
        plan, skipped = (payload, []) if isinstance(payload, ActorPlan) else unpack(payload)

        def report(fault: Fault) -> None:
            _answer(conn, FAULT, fault)
            if _unread(conn).endswith(QUIT):
                raise _QuitRequested

        actors = _make_actors(plan, skipped, report)
        _answer(conn, READY, actors.spaces)
        layout = conn.recv()
        fd = reduction.recv_handle(conn)
        actors.attach(Buffers(layout, fd))
        os.close(fd)
        _answer(conn, ATTACHED)
        _serve(conn, actors)
    except _QuitRequested:
        if actors is not None:
            _answer(conn, QUIT, _close(actors))
    except BaseException as err:
        with contextlib.suppress(*_DISCONNECTED):
            text = str(err) if isinstance(err, EnvironmentMistake) else traceback.format_exc()
            _answer(conn, FAILED, (type(err) if isinstance(err, (RecordingError, EnvironmentMistake)) else None, text))
    finally:
        with contextlib.suppress(Exception):
            if actors is not None:
                actors.close()
        conn.close()


def _make_actors(plan: ActorPlan, skipped: list[config.Binding], report: Callable[[Fault], None]) -> ActorSet:
    """The actors of a plan, made with the bindings that were ``skipped`` if making them has imported the classes concerned."""
    _seed_process(plan)
    actors = ActorSet(plan, report, reduction.ForkingPickler.dumps)
    late = [b for b in skipped if not b[1].startswith(_OF_LEARNERS)]
    if len(config.import_bindings(late)) == len(late):
        return actors
    actors.close()
    _seed_process(plan)
    return ActorSet(plan, report, reduction.ForkingPickler.dumps)


def _seed_process(plan: ActorPlan) -> None:
    """Seed the global random generators, for environments that use them."""
    seeds = plan.process_seed().generate_state(2)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))


def _unread(conn: Connection) -> bytes:
    """Commands and messages that have arrived and were not read yet."""
    with socket.socket(fileno=os.dup(conn.fileno())) as end:
        end.setblocking(True)
        try:
            return end.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


def _kill_orphan(fd: int) -> None:
    """Kill this process if it is still there some time after the learner's end: then its environment hangs."""
    poll = select.poll()
    poll.register(fd, 0)  # no events but the closing of the other end
    poll.poll()
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(conn: Connection, command: bytes, *message: object) -> None:
    os.write(conn.fileno(), command)
    for part in message:
        conn.send(part)


def _serve(conn: Connection, actors: ActorSet) -> None:
    """Answer commands until `QUIT`, or until the learner has closed its end."""
    fd = conn.fileno()
    step_group = {command: group for group, command in enumerate(STEP_GROUP)}
    while command := os.read(fd, 1):
        if command in step_group:
            actors.step(step_group[command])
            os.write(fd, command)
        elif command == ASK:
            number, method, args = conn.recv()
            _answer(conn, ASK, (number, getattr(actors, method)(*args)))
        else:
            _answer(conn, QUIT, _close(actors))
            return


def _close(actors: ActorSet) -> str | None:
    """Close the actors; returns the traceback if trajectories could not be committed."""
    try:
        actors.close()
    except Exception:
        return traceback.format_exc()
    return None
