"""The messages between the learner and its worker processes.

The learner holds one `amago.envs.pool.handle.WorkerHandle` a worker; the worker's end is `amago.envs.pool.worker`. They share one socket,
and the arrays of `amago.envs.pool.buffers`, which hold observations and actions. A command is one byte; the answer is the same byte.
Rare ones are followed by a pickled message.

A worker starts by itself: it makes its environments, answers `READY` with their spaces, receives the layout of the arrays and the
file descriptor of their memory, and answers `ATTACHED`. From then on it answers commands in the order of their arrival:

| command | the worker | message to it | message back |
| --- | --- | --- | --- |
| `STEP_GROUP[g]` | steps the actors of group g | | |
| `STEP_ALL` | steps the actors of every group | | |
| `RESET` | resets all actors | | |
| `DRAIN` | reports statistics | | `PhaseStatistics` |
| `FLUSH`, `FLUSH_PARTIAL` | commits finished (and parts of unfinished) trajectories | | how many, an int |
| `GET_STATE` | reports the state of all actors | | dict |
| `SET_STATE` | loads the state of all actors | dict | |
| `CALL` | calls a method of each environment, or reads an attribute | (name, args, kwargs) | {actor's number: its `Answer`} |
| `QUIT` | closes everything and ends | | a traceback, or None |

Two messages come without a command: `FAULT`, when an environment was replaced (with a `Fault`), and `FAILED`, when the worker cannot
go on (with the class of an error that ends the run, or None, and a text), after which it ends.
"""

from __future__ import annotations

READY, ATTACHED = b"I", b"A"
STEP_GROUP = tuple(b"%d" % group for group in range(10))
STEP_ALL = b"B"
RESET = b"R"
DRAIN = b"D"
FLUSH, FLUSH_PARTIAL = b"F", b"P"
GET_STATE, SET_STATE = b"S", b"L"
CALL = b"C"
QUIT = b"Q"
FAULT, FAILED = b"!", b"X"

ANSWERED_WITH_MESSAGE = frozenset((READY, DRAIN, FLUSH, FLUSH_PARTIAL, GET_STATE, CALL, QUIT))
