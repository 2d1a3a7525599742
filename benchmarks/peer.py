"""Measurement of another implementation of the same interface, in turns with this library.

``--peer PATH`` is the folder from which ``import amago`` imports that implementation, ``--peer-python`` an interpreter with its
dependencies, which runs `benchmarks/peer_side.py` in one process per case. Cases and figures are exchanged as JSON lines over
its standard input and output.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SIDE = Path(__file__).with_name("peer_side.py")
_END_SECONDS = 20.0


class PeerError(RuntimeError):
    """The peer failed; the message contains its traceback, or the end of its output."""


class Peer:
    """A process that measures one case on another implementation.

    Args:
        path: folder of the implementation's package.
        python: its interpreter.
        case: the case as JSON values: "benchmark", "threads" and the keys that `peer_contenders` lists.

    Raises:
        PeerError: the case could not be set up.
    """

    def __init__(self, path: str, python: str, case: Mapping[str, Any]):
        threads = str(case["threads"])
        env = os.environ | {"PYTHONPATH": os.path.abspath(path), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self._written = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, str(SIDE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._written, text=True, env=env
        )
        try:
            self._tell(case)
            self._answer("ready")
        except BaseException:
            self.close()
            raise

    def __call__(self) -> float:
        """Measure once, and return the figure.

        Raises:
            PeerError: the measurement failed.
        """
        self._tell({})
        return float(self._answer("figure"))

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` reports the reason
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _answer(self, key: str) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            message = json.loads(line)
            if "error" in message:
                raise PeerError(f"the peer failed:\n{message['error']}")
            if key in message:
                return message[key]
        self._written.seek(0)
        raise PeerError(f"the peer's process has ended; its last output was:\n{self._written.read()[-3000:]}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._written.close()


@contextlib.contextmanager
def peer_contenders(options: Namespace, benchmark: str, **case: Any) -> Iterator[dict[str, Callable[[], float]]]:
    """Yields {"peer": a contender that measures this case}, or {} without ``--peer``.

    Args:
        options: the options of the command.
        benchmark: "policy_step", "rollout" or "learner".
        case: "traj" ("FF", "GRU" or "Transformer"), "context", "actors", "seconds" (of a measurement), "bindings" (gin), "env"
            ("CartPole" or "noise"), "obs_shape", "episode" (steps per rollout); for "noise" "choices" or "action_width";
            optionally "mode" of the environments; for "learner" also "agent" (name of the class), "batch" and "bf16".
    """
    if options.peer is None:
        yield {}
        return
    peer = Peer(options.peer, options.peer_python, {"benchmark": benchmark, "threads": options.threads, **case})
    try:
        yield {"peer": peer}
    finally:
        peer.close()
