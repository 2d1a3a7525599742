"""A discrete-event simulation of a launched run, from the costs of `benchmarks.cluster_model`.

What is simulated are the loops of the library with their own periods: collectors that act in phases, look at their orders four
times a second and pause; nodes that deliver finished rollouts in bundles to one ingest; a learner that looks into its store,
waits, updates, and publishes its weights. Nothing is computed and nothing sleeps: minutes of a thousand collectors take seconds.
A simulation with the same arguments gives the same figures.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amago.launch.bundles import BUNDLE_BYTES
from amago.run.launched.protocol import UpdateLimits
from amago.run.launched.roles import LOOK_SECONDS as BEAT_SECONDS
from benchmarks import cluster_model as cm
from benchmarks.cluster_model import Cluster, Constants

PAUSE_SECONDS = 0.2
"""Between two looks of a paused collector at its orders."""
WAIT_SECONDS = 0.1
"""Between two decisions of a learner that waits."""


@dataclass(frozen=True)
class Sample:
    """The state of the run at one time.

    Attributes:
        time: seconds since the start.
        made: environment steps taken by collectors.
        stored: environment steps that the learner has found in its store.
        updates: made by the learner.
        spool: environment steps in finished files that have not arrived in the store's directory.
        lag_versions, lag_seconds: mean over collectors, of the policy that acts: versions behind the newest, and age, as the launcher
            hears of them from the learner's and the collectors' beats.
        paused: share of the collectors that pause.
    """

    time: float
    made: int
    stored: int
    updates: int
    spool: int
    lag_versions: float
    lag_seconds: float
    paused: float


@dataclass
class File:
    """Finished rollouts on their way, since a time."""

    steps: int
    size: float
    since: float


@dataclass
class Collector:
    """One process that acts.

    Attributes:
        taken: steps of each of its actors.
        left: steps of each actor until its phase is over.
        given: steps of each actor in rollouts that were written to files.
        version: of the policy that acts; told: in its last beat.
        seconds: spent acting, paused, and reading weights.
    """

    node: Node
    random: random.Random
    taken: int = 0
    left: int = 0
    given: int = 0
    version: int = 0
    told: int = 0
    paused: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: {"acting": 0.0, "paused": 0.0, "loading": 0.0, "writing": 0.0})


@dataclass
class Node:
    """A machine with collectors: finished files, and what the learner wants."""

    spool: deque[File] = field(default_factory=deque)
    pause: bool = False
    version: int = 0  # whose weights are on this machine


@dataclass(frozen=True)
class Result:
    """Figures of a simulated run, from ``since`` until its end; rates are a second.

    Attributes:
        steps, updates: a second, as the learner counts them.
        ratio: of updates to steps, over this time; final_ratio: of the counters at the end.
        lag_versions, lag_seconds: means over time.
        learner: shares of the time: "updating", "waiting", "looking", "publishing".
        collectors: shares of the time: "acting", "paused", "loading", "writing".
        bytes: a second, that arrive in the store; weight_bytes: that leave the learner's machine.
        spool: most environment steps, at any sample, in files that had not arrived.
        files: in the store at the end.
        samples: of the whole run.
        made, unfinished, spooled, arriving, stored: environment steps at the end: taken; of these in rollouts that are not in a file
            yet, in files on their way, in the store's directory but not found yet, and found by the learner.
    """

    since: float
    seconds: float
    steps: float
    updates: float
    ratio: float
    final_ratio: float
    lag_versions: float
    lag_seconds: float
    learner: dict[str, float]
    collectors: dict[str, float]
    bytes: float
    weight_bytes: float
    spool: int
    files: int
    samples: list[Sample]
    made: int
    unfinished: int
    spooled: int
    arriving: int
    stored: int


class Simulation:
    """One run.

    Args:
        cluster: what runs.
        constants: what it costs.
        seed: of the random durations. Those of the learner and of each collector have streams of their own.
        starts: when each collector begins, in seconds; None: at random times within one phase.
        sample: seconds between two samples.
        files: in the store at the start, of earlier data whose steps do not count.
    """

    def __init__(
        self,
        cluster: Cluster,
        constants: Constants,
        seed: int = 0,
        starts: Sequence[float] | None = None,
        sample: float = 0.5,
        files: int = 0,
    ):
        self.cluster, self.constants, self.sample_seconds = cluster, constants, sample
        self.limits = UpdateLimits(cluster.least, cluster.most, cluster.warmup)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.samples: list[Sample] = []
        self._random = random.Random(f"{seed}-learner")
        self.nodes = [Node() for _ in range(max(1, cluster.nodes))]
        self.collectors = [
            Collector(self.nodes[i % len(self.nodes)], random.Random(f"{seed}-{i}")) for i in range(cluster.collectors)
        ]
        # the learner
        self.updates, self.stored, self.files = 0, 0, files
        self.version = self._told = 0  # of the published policy; in its last beat
        self._heard = [0.0]  # when the launcher has heard of each version
        self._next_look = 0.0
        self._arrived: list[File] = []  # in the directory, not found yet
        self._sent = self._finding = 0  # steps between a spool and the directory, and those of a look that goes on
        self._pause = False  # as its last beat says
        self.learner = {"updating": 0.0, "waiting": 0.0, "looking": 0.0, "publishing": 0.0}
        # what all nodes share
        self._ingest_free = self._network_free = 0.0
        self.arrived_bytes = self.weight_bytes = 0.0

        if starts is None:
            first = cm.phase_seconds(cluster, constants)
            starts = [c.random.random() * first for c in self.collectors]
        for collector, start in zip(self.collectors, starts, strict=True):
            self._at(start, self._begin_phase, collector)
        for node in self.nodes:
            self._at(0.0, self._pump, node)
            self._at(0.0, self._follow, node)
        self._at(0.0, self._decide)
        self._at(sample, self._take_sample)

    # ---- time ------------------------------------------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), action, arguments))

    def _vary(self, seconds: float, stream: random.Random) -> float:
        """A duration with the mean ``seconds``, uniformly distributed about it."""
        jitter = self.cluster.jitter
        return seconds * (1.0 + jitter * math.sqrt(12.0) * (stream.random() - 0.5)) if jitter else seconds

    def run_until(self, time: float) -> None:
        """Simulate until this time."""
        while self._events and self._events[0][0] <= time:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        self.now = time

    # ---- a collector -----------------------------------------------------------------------------------------------------

    def _begin_phase(self, collector: Collector) -> None:
        collector.left = self.cluster.phase
        collector.version = collector.node.version if self.cluster.nodes else self.version
        seconds = cm.load_seconds(self.cluster, self.constants)  # also of weights that it has read before
        collector.seconds["loading"] += seconds
        self._at(self.now + seconds, self._act, collector)

    def _act(self, collector: Collector) -> None:
        """Some steps, until the collector looks at its orders."""
        steps = min(collector.left, max(1, math.ceil(BEAT_SECONDS / self.cluster.step)))
        seconds = self._vary(steps * self.cluster.step, collector.random)
        collector.seconds["acting"] += seconds
        self._at(self.now + seconds, self._acted, collector, steps)

    def _acted(self, collector: Collector, steps: int) -> None:
        collector.taken += steps
        collector.told = collector.version
        collector.left -= steps
        self._go_on(collector)

    def _go_on(self, collector: Collector) -> None:
        collector.paused = collector.node.pause
        if collector.paused:
            collector.seconds["paused"] += PAUSE_SECONDS
            self._at(self.now + PAUSE_SECONDS, self._go_on, collector)
        elif collector.left:
            self._act(collector)
        else:
            collector.seconds["writing"] += self.constants.phase
            self._at(self.now + self.constants.phase, self._end_phase, collector)

    def _end_phase(self, collector: Collector) -> None:
        c = self.cluster
        finished = collector.taken // c.horizon * c.horizon
        if finished > collector.given:
            steps = (finished - collector.given) * c.actors
            collector.given = finished
            collector.node.spool.append(File(steps, steps * c.step_bytes + c.file_bytes, self.now))
        self._begin_phase(collector)

    # ---- a node and the ingest -------------------------------------------------------------------------------------------

    def _pump(self, node: Node) -> None:
        """Deliver the bundles that are full, and files that have waited long enough; one bundle after another."""
        bundle, size = [], 0.0
        while node.spool and (not bundle or size + node.spool[0].size <= BUNDLE_BYTES):
            bundle.append(node.spool.popleft())
            size += bundle[-1].size
        due = bundle and self.now - bundle[0].since >= cm.bundle_seconds(self.cluster)
        if node.spool or size >= BUNDLE_BYTES or due:
            here = self._transfer(size) if self.cluster.nodes else self.now
            seen = math.ceil(here / cm.bus_seconds(self.cluster)) * cm.bus_seconds(self.cluster)  # the ingest's next look
            done = max(seen, self._ingest_free) + cm.ingest_seconds(self.cluster, self.constants, len(bundle), size)
            self._ingest_free = done
            self._sent += sum(file.steps for file in bundle)
            self._at(done, self._deliver, bundle)
            self._at(here, self._pump, node)
        else:
            node.spool.extendleft(reversed(bundle))
            self._at(self.now + cm.PUMP_SECONDS, self._pump, node)

    def _follow(self, node: Node) -> None:
        """A node hears what the learner wants, and fetches the newest weights."""
        node.pause = self._pause
        ready = self.now
        if self.cluster.nodes and node.version != self.version:
            self.weight_bytes += self.cluster.weights
            ready = self._transfer(self.cluster.weights)
            self._at(ready, self._receive_weights, node, self.version)
        self._at(ready + cm.bus_seconds(self.cluster), self._follow, node)

    def _transfer(self, size: float) -> float:
        """When so many bytes have passed the network of the learner's machine, which carries one thing after another."""
        self._network_free = max(self.now, self._network_free) + size / self.cluster.network
        return self._network_free

    def _receive_weights(self, node: Node, version: int) -> None:
        node.version = version

    def _deliver(self, bundle: list[File]) -> None:
        self._arrived += bundle
        self._sent -= sum(file.steps for file in bundle)
        self.arrived_bytes += sum(file.size for file in bundle)

    # ---- the learner -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Look into the store if that is due; then update or wait."""
        if self.now >= self._next_look:
            self._look(self._decide)
            return
        c = self.cluster
        if self.stored and not self.limits.learner_waits(self.updates, self.stored):
            seconds = cm.update_seconds(c, self.constants)
            slowest = max(self._vary(seconds, self._random) for _ in range(c.learners))  # all ranks wait for the last
            self.learner["updating"] += slowest
            self._at(self.now + slowest, self._updated)
        else:
            self.learner["waiting"] += WAIT_SECONDS
            self._at(self.now + WAIT_SECONDS, self._decide)

    def _look(self, then: Callable[[], None]) -> None:
        new, self._arrived = self._arrived, []
        self._finding = sum(file.steps for file in new)
        seconds = cm.look_seconds(self.constants, self.files, len(new))
        self.learner["looking"] += seconds
        self._next_look = self.now + cm.look_period(seconds)
        self._at(self.now + seconds, self._found, new, then)

    def _found(self, new: list[File], then: Callable[[], None]) -> None:
        self.files += len(new)
        self.stored += self._finding
        self._finding = 0
        self._pause, self._told = self.limits.collectors_pause(self.updates, self.stored), self.version
        then()

    def _updated(self) -> None:
        self.updates += 1
        if self.updates % self.cluster.epoch:
            self._decide()
            return
        seconds = cm.publish_seconds(self.cluster, self.constants) + self.constants.epoch
        self.learner["publishing"] += seconds
        self._at(self.now + seconds, self._publish)

    def _publish(self) -> None:
        self.version += 1
        self._look(self._decide)  # the next epoch begins with one

    # ---- figures ---------------------------------------------------------------------------------------------------------

    def _take_sample(self) -> None:
        acting = [c.told for c in self.collectors]
        newest = max(self._told, *acting)
        self._heard += [self.now] * (newest + 1 - len(self._heard))
        ages = [self.now - self._heard[v] for v in acting]
        self.samples.append(
            Sample(
                self.now,
                self.made,
                self.stored,
                self.updates,
                self.spooled,
                float(np.mean([newest - v for v in acting])),
                float(np.mean(ages)),
                float(np.mean([c.paused for c in self.collectors])),
            )
        )
        self._at(self.now + self.sample_seconds, self._take_sample)

    @property
    def made(self) -> int:
        """Environment steps that collectors have taken."""
        return self.cluster.actors * sum(c.taken for c in self.collectors)

    @property
    def unfinished(self) -> int:
        """Environment steps in rollouts that are not in a file yet."""
        return self.cluster.actors * sum(c.taken - c.given for c in self.collectors)

    @property
    def spooled(self) -> int:
        """Environment steps in files that have not arrived in the store's directory."""
        return self._sent + sum(file.steps for node in self.nodes for file in node.spool)

    @property
    def arriving(self) -> int:
        """Environment steps in the directory that the learner has not found yet."""
        return self._finding + sum(file.steps for file in self._arrived)


def simulate(
    cluster: Cluster,
    constants: Constants,
    seconds: float,
    since: float | None = None,
    seed: int = 0,
    starts: Sequence[float] | None = None,
    files: int = 0,
    sample: float = 0.5,
) -> Result:
    """Simulate a run.

    Args:
        seconds: of the run.
        since: figures count from here; None: from the middle.
        seed, starts, files, sample: as in `Simulation`.

    Raises:
        ValueError: ``since`` is not before the end.
    """
    since = seconds / 2 if since is None else since
    if not 0 <= since < seconds:
        raise ValueError(f"since must be in [0, {seconds:g}), got {since:g}")
    run = Simulation(cluster, constants, seed, starts, sample, files)
    run.run_until(since)
    before = _counters(run)
    run.run_until(seconds)
    gained = {name: value - before[name] for name, value in _counters(run).items()}
    taken, count = seconds - since, cluster.collectors
    late = [s for s in run.samples if s.time > since]
    return Result(
        since=since,
        seconds=seconds,
        steps=gained["stored"] / taken,
        updates=gained["updates"] / taken,
        ratio=gained["updates"] / gained["stored"] if gained["stored"] else math.nan,
        final_ratio=run.updates / run.stored if run.stored else math.nan,
        lag_versions=float(np.mean([s.lag_versions for s in late])) if late else math.nan,
        lag_seconds=float(np.mean([s.lag_seconds for s in late])) if late else math.nan,
        learner={name: gained[f"learner {name}"] / taken for name in run.learner},
        collectors={name: gained[f"collectors {name}"] / taken / count for name in run.collectors[0].seconds},
        bytes=gained["bytes"] / taken,
        weight_bytes=gained["weights"] / taken,
        spool=max((s.spool for s in run.samples), default=0),
        files=run.files,
        samples=run.samples,
        made=run.made,
        unfinished=run.unfinished,
        spooled=run.spooled,
        arriving=run.arriving,
        stored=run.stored,
    )


def _counters(run: Simulation) -> dict[str, float]:
    found: dict[str, float] = {
        "stored": run.stored, "updates": run.updates, "bytes": run.arrived_bytes, "weights": run.weight_bytes,
    }  # fmt: skip
    found |= {f"learner {name}": seconds for name, seconds in run.learner.items()}
    for name in run.collectors[0].seconds:
        found[f"collectors {name}"] = sum(c.seconds[name] for c in run.collectors)
    return found
