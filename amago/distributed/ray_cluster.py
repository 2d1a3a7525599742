"""Collectors on the nodes of a Ray cluster: which node has which, and what becomes of them when nodes come and go."""

from __future__ import annotations

import importlib
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amago import __version__
from amago.distributed.children import CollectorError
from amago.distributed.link import Beats
from amago.distributed.node import Orders, Status
from amago.distributed.place import Task
from amago.distributed.ray_place import no_cluster
from amago.distributed.shares import assign
from amago.distributed.shipping import pack, pack_library
from amago.run.roles.protocol import STATE_FILE, Assignment, collector_dir, read_soon

_LOOK_SECONDS = 2.0  # between two looks at the nodes of the cluster
_EXCHANGE_SECONDS = 0.5  # between two calls of an agent
_HUNG_SECONDS, _INGEST_DEATHS = 180.0, 5
_SILENT_SECONDS = 60.0
"""An agent that has not answered for so long is told of."""


@dataclass
class _Agent:
    """What the launcher knows of a node and its agent."""

    name: str
    handle: Any
    status: Status | None = None
    call: Any = None
    called: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    seen: int = 0
    silent: bool = False


class _Ingest:
    """The ingest actor. Ray starts it again when its process ends; one that has ended for good is made anew.

    Args:
        ray: the package.
        make: makes the actor.
    """

    def __init__(self, ray: Any, make: Callable[[], Any]):
        self._ray, self._make = ray, make
        self.handle = make()
        self._call: Any = None
        self._called, self._deaths = time.monotonic(), 0

    def check(self, now: float) -> str:
        """What is wrong with it, the first time; else nothing.

        Raises:
            CollectorError: it has ended for good several times in a row.
        """
        if self._call is None:
            if now >= self._called + _LOOK_SECONDS:
                self._called, self._call = now, self.handle.pid.remote()
            return ""
        if not self._ray.wait([self._call], timeout=0)[0]:
            if now < self._called + _HUNG_SECONDS:
                return ""
            self._call, self._called = None, now
            self._ray.kill(self.handle, no_restart=False)
            return f"nothing has arrived from the nodes for {_HUNG_SECONDS:.0f} seconds: the process that takes it is replaced"
        call, self._call = self._call, None
        try:
            self._ray.get(call, timeout=1)
            self._deaths = 0
        except self._ray.exceptions.ActorDiedError as err:
            self._deaths += 1
            if self._deaths == _INGEST_DEATHS:
                raise CollectorError(f"what collectors write cannot be taken: {_cause(err)}") from None
            self.handle = self._make()
            return f"the process that takes what collectors write is replaced: {_cause(err)}"
        except self._ray.exceptions.RayError:  # it is being started again
            pass
        return ""


class RayCluster:
    """The collectors of a launch on the nodes of a Ray cluster.

    Each node gets its share of the collectors by its CPUs, the learner's less one for each learner. When a node joins or is gone, the
    shares are made again, and as few collectors as possible move.

    Args:
        task: of each collector.
        collectors: how many there are.
        learners: processes that train on this machine.
        control: directory of the small files of launcher and learner.
        address: of the cluster: "auto", or "HOST:PORT". This machine must be one of its nodes.
        node_dir: template of the directory in which nodes keep what is not delivered yet (`amago.distributed.ray_actors.node_home`); None:
            the temporary directory.

    Attributes:
        news: sentences for the user, until somebody takes them.

    Raises:
        ImportError: Ray is not installed.
        ValueError: there is no such cluster, or the program's files are too large.
    """

    def __init__(self, task: Task, collectors: int, learners: int, control: Path, address: str, node_dir: str | None = None):
        self.collectors, self.learners, self.control = collectors, learners, control
        self.news: list[str] = []
        self._ray = importlib.import_module("ray")
        self._files = control / "files"
        shutil.rmtree(self._files, ignore_errors=True)
        try:
            self._task = replace(task, program=pack(task.program, self._files / "program"))
            self._connect(address)
        except BaseException:
            shutil.rmtree(self._files, ignore_errors=True)
            raise
        self._actors = importlib.import_module("amago.distributed.ray_actors")
        self._node_dir = self._actors.DEFAULT_NODE_DIR if node_dir is None else node_dir
        self._here: str = self._ray.get_runtime_context().get_node_id()
        self._launch = uuid.uuid4().hex
        self._ingest: _Ingest | None = None
        self._setup: Any = None
        self._run_dir = Path()
        self._agents: dict[str, _Agent] = {}  # by node
        self._unfit: dict[str, str] = {}  # nodes that can run no collectors, and why
        self._holders: dict[int, str] = {}  # the node of each collector
        self._replaced, self._look_at, self._ends, self._troubled = 0, 0.0, False, False

    def _connect(self, address: str) -> None:
        (self._files / "program").mkdir(parents=True, exist_ok=True)
        sent: dict[str, Any] = {"working_dir": str(self._files / "program")}
        library = pack_library(self._files)
        if library is not None:
            sent["py_modules"] = [str(library)]
        try:
            self._ray.init(
                address=address, runtime_env=sent, namespace=f"amago-{uuid.uuid4().hex}", log_to_driver=False,
                logging_level=logging.ERROR,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as err:
            raise ValueError(no_cluster(address, err)) from err

    # ---- for the launcher ------------------------------------------------------------------------------------------------

    def meet_learner(self, hello: Mapping[str, Any]) -> None:
        """The learner has said where its run ("run_dir") and its store ("save_to") are, once."""
        self._run_dir = Path(hello["run_dir"])
        record = read_soon(self._run_dir / "settings.json") or {}
        run_id = str(
            record.get("id", self._launch)
        )  # so that what nodes have not delivered is found by the next launch of the run
        self._setup = self._actors.Setup(self._task, self._node_dir, self._run_dir.name, run_id, self._launch, __version__)
        beat_file = Assignment("learner", 0, self.collectors, str(self.control)).beat_file
        remote = self._ray.remote(self._actors.IngestActor).options(name=self._actors.INGEST, **self._on(self._here))
        self._ingest = _Ingest(self._ray, lambda: remote.remote(dict(hello), str(beat_file)))

    def _on(self, node: str) -> dict[str, Any]:
        """Options of an actor of a node: it needs no CPU of Ray's, and is started again there, and nowhere else."""
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(node, soft=False)
        return {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": strategy}

    def tend(self) -> None:
        """Look after nodes, and talk to their agents; waits for the cluster alone.

        Raises:
            CollectorError: no node can run collectors.
        """
        if self._ingest is None:
            return
        if not self._ends:
            trouble = self._ingest.check(time.monotonic())
            self.news += [trouble] if trouble else []
        self._look()
        self._exchange()

    @property
    def beats(self) -> Beats:
        """What each collector says of itself, by name; empty before its start."""
        found: dict[str, Mapping[str, Any]] = {f"collector-{i}": {} for i in range(self.collectors)}
        for index, node in self._holders.items():
            agent = self._agents.get(node)
            if agent is not None and agent.status is not None:
                found[f"collector-{index}"] = agent.status.beats.get(f"collector-{index}", {})
        return found

    @property
    def replaced(self) -> int:
        """Processes that were replaced so far."""
        return self._replaced + sum(agent.status.replaced for agent in self._agents.values() if agent.status is not None)

    @property
    def waiting(self) -> int:
        """Bytes that could not be delivered when that was last tried."""
        return sum(agent.status.waiting for agent in self._agents.values() if agent.status is not None)

    @property
    def run(self) -> int:
        """How many collectors run; agents count that have not answered, or still have something to deliver."""
        return sum(1 if a.status is None else a.status.run + a.status.left for a in self._agents.values())

    def end(self) -> None:
        """Ask all collectors to end."""
        self._ends = True
        for agent in self._agents.values():
            agent.called = 0.0

    def close(self) -> None:
        """End everything at once."""
        for agent in self._agents.values():
            self._end(agent.handle)
        if self._ingest is not None:
            self._end(self._ingest.handle)
        self._ray.shutdown()
        shutil.rmtree(self._files, ignore_errors=True)

    def _end(self, actor: Any) -> None:
        if actor is not None:
            try:
                self._ray.kill(actor, no_restart=True)
            except Exception as err:
                logging.getLogger(__name__).debug("an actor could not be ended: %s", err)

    # ---- nodes -----------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See which nodes there are, and divide the collectors among them.

        Raises:
            CollectorError: no node can run collectors.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        try:
            nodes = {n["NodeID"]: n for n in self._ray.nodes() if n["Alive"]}
            self._troubled = False
        except Exception as err:  # of many kinds, none of which shall end the learner
            if not self._troubled:
                self.news.append(f"the Ray cluster does not answer, and the launch goes on with what it has: {err}")
            self._troubled = True
            return
        for node in self._agents.keys() - nodes.keys():
            self._lose(node)
        if self._ends:
            return
        sizes = self._sizes([n for node, n in nodes.items() if node not in self._unfit])
        if not sizes:
            raise CollectorError("\n".join(["no node of the cluster can run collectors", *self._unfit.values()]))
        before, self._holders = self._holders, assign(self.collectors, sizes, self._holders)
        self._replaced += sum(before.get(i, node) != node for i, node in self._holders.items())
        for node in sorted(set(self._holders.values()) - self._agents.keys()):
            self._join(node, nodes[node], first=not before)

    def _sizes(self, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """CPUs for collectors, of the nodes that have any; if none has, all nodes count alike."""
        left = {n["NodeID"]: n["Resources"].get("CPU", 0.0) - self.learners * (n["NodeID"] == self._here) for n in nodes}
        return {node: cpus for node, cpus in left.items() if cpus > 0} or dict.fromkeys(left, 1.0)

    def _join(self, node: str, info: Mapping[str, Any], first: bool) -> None:
        name = f"{info['NodeManagerHostname']} ({node[:6]})"
        remote = self._ray.remote(self._actors.NodeAgent)
        self._agents[node] = _Agent(name, remote.options(**self._on(node)).remote(self._setup))
        if not first:
            self.news.append(f"node {name} has joined")

    def _lose(self, node: str) -> None:
        agent = self._agents.pop(node)
        had = sum(holder == node for holder in self._holders.values())
        self.news.append(f"node {agent.name} is gone; {had} of the collectors start on other nodes")
        self._replaced += agent.status.replaced if agent.status is not None else 0
        self._end(agent.handle)

    def _fail(self, node: str, why: str) -> None:
        """Use a node no more."""
        agent = self._agents.pop(node)
        self.news.append(f"node {agent.name} can run no collectors: {why}")
        self._unfit[node] = f"{agent.name}: {why}"
        self._end(agent.handle)
        self._look_at = 0.0

    # ---- calls -----------------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Send orders to agents, and take their answers, without waiting."""
        now = time.monotonic()
        for node, agent in list(self._agents.items()):
            if agent.call is not None:
                self._take(node, agent, now)
            if agent.call is None and node in self._agents and now >= agent.called + _EXCHANGE_SECONDS:
                agent.called = now
                agent.call = agent.handle.exchange.remote(self._orders(node, agent))

    def _take(self, node: str, agent: _Agent, now: float) -> None:
        """Take the answer of an agent, if it is there."""
        if not self._ray.wait([agent.call], timeout=0)[0]:
            if now > agent.heard + _SILENT_SECONDS and not agent.silent:
                agent.silent = True
                self.news.append(f"node {agent.name} has not answered for {_SILENT_SECONDS:.0f} seconds")
            return
        call, agent.call = agent.call, None
        try:
            status: Status = self._ray.get(call, timeout=1)
        except (self._ray.exceptions.ActorDiedError, self._ray.exceptions.RuntimeEnvSetupError) as err:
            if self._is_alive(node):  # it could not be started, or it would be started again
                self._fail(node, _cause(err))
            return
        except self._ray.exceptions.RayError:  # it is being started again, or the node is about to be found dead
            return
        agent.heard, agent.silent, agent.status = now, False, status
        news = status.news[max(0, agent.seen - status.first) :]
        self.news += [f"{text} (node {agent.name})" for text in news]
        agent.seen = status.first + len(status.news)
        if status.failure:
            self._fail(node, status.failure)

    def _is_alive(self, node: str) -> bool:
        try:
            return any(n["NodeID"] == node and n["Alive"] for n in self._ray.nodes())
        except Exception:
            return False

    def _orders(self, node: str, agent: _Agent) -> Orders:
        wanted = frozenset(index for index, holder in self._holders.items() if holder == node)
        there = frozenset() if agent.status is None else agent.status.collectors
        return Orders(wanted, {i: s for i in wanted - there if (s := self._state(i)) is not None}, self._ends, agent.seen)

    def _state(self, index: int) -> bytes | None:
        """The exploration schedules with which a collector goes on that begins on another node."""
        try:
            return (collector_dir(self._run_dir, index) / STATE_FILE).read_bytes()
        except OSError:
            return None


def _cause(err: Exception) -> str:
    """The last line of an error from another process, which says what went wrong."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[-1] if lines else type(err).__name__
