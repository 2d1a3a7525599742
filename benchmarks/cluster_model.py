"""The cost model of a launched run: how fast it collects and learns, and what saturates first, as pure functions.

A launch (`amago.launch`) has a learner, of one or more ranks, and collectors on one or more nodes. Two descriptions go in: a
`Cluster`, what somebody wants to run, and `Constants`, what the parts of the library cost on a machine
(``python -m benchmarks cluster --constants``). `predict` gives the steady state in closed form, `saturation` how many collectors
each resource can serve. `benchmarks.cluster_simulation` plays the same costs out event by event.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from amago.launch.bundles import BUNDLE_BYTES, BUNDLE_SECONDS, LOCAL_SECONDS
from amago.run.launched.roles import LOOK_SECONDS, LOOKS_SHARE

PUMP_SECONDS = 0.25
"""Between two looks of a node at its collectors' files."""
MEASURED = Path(__file__).parent / "cluster_measured.json"
"""The constants that docs/scaling.md shows."""


@dataclass(frozen=True)
class Constants:
    """What parts of a launch cost. All are seconds, unless a name ends in ``_rate``: bytes (or sequences) a second.

    Attributes:
        call: one call of `Ingest.pull` that brings files, whatever it brings: three fsyncs.
        move_file: each file that lies on the learner's disk, bundled there.
        copy_file, copy_rate: each file that comes in a bundle; and its bytes.
        look, look_file, new_file: a look of the learner at its store; for each file there; for each new file.
        publish, publish_rate: the learner writes weights.
        load, load_rate: a collector reads weights.
        phase: the rest of a phase of a collector: files, reports, logs.
        epoch: the rest of an epoch of the learner.
        read_rate: sequences a second that the reading threads deliver while nothing else runs.
        start: of a collector, until its first step, while nothing else runs.
        memory: bytes of main memory that each further collector takes.
    """

    call: float = 0.0
    move_file: float = 0.0
    copy_file: float = 0.0
    copy_rate: float = math.inf
    look: float = 0.0
    look_file: float = 0.0
    new_file: float = 0.0
    publish: float = 0.0
    publish_rate: float = math.inf
    load: float = 0.0
    load_rate: float = math.inf
    phase: float = 0.0
    epoch: float = 0.0
    read_rate: float = math.inf
    start: float = 0.0
    memory: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (field.name.endswith("_rate") and not value > 0):
                raise ValueError(
                    f"{field.name} of Constants must be {'above' if 'rate' in field.name else 'at least'} 0, got {value}"
                )

    @classmethod
    def load_from(cls, path: str | Path = MEASURED) -> Constants:
        """The constants in a file of `save`.

        Raises:
            ValueError: the file holds other names.
        """
        found = json.loads(Path(path).read_text())["constants"]
        names = {field.name for field in fields(cls)}
        if strange := set(found) ^ names:
            raise ValueError(f"{path} lacks, or should not have: {', '.join(sorted(strange))}")
        return cls(**found)

    def save(self, path: str | Path, **about: str | float) -> None:
        """Write the constants as JSON.

        Args:
            about: where and how they were measured.
        """
        Path(path).write_text(json.dumps({"about": about, "constants": asdict(self)}, indent=1) + "\n")


@dataclass(frozen=True)
class Cluster:
    """A run to be launched.

    Attributes:
        collectors: processes that act.
        actors: environments of each.
        step: seconds of one step of all actors of a collector, environments and policy together.
        phase: steps of each actor between two deliveries (``train_timesteps_per_epoch``).
        horizon: steps of a rollout; only finished rollouts are delivered.
        update: seconds of one update, in all ranks.
        epoch: updates between two publications (``train_batches_per_epoch``).
        least, most: updates per environment step (``--updates-per-step``).
        warmup: environment steps before the first update.
        step_bytes: of a transition on disk.
        file_bytes: of a file beside its transitions.
        weights: bytes of the published policy.
        batch: sequences of an update, in each rank.
        learners: ranks.
        nodes: machines with collectors beside that of the learner; 0: all are on its machine, and files are moved.
        network: bytes a second between the learner's machine and all others together.
        jitter: coefficient of variation of the time of an update and of a step, below 0.5.
    """

    collectors: int
    actors: int = 16
    step: float = 0.01
    phase: int = 200
    horizon: int = 100
    update: float = 0.1
    epoch: int = 100
    least: float = 0.0
    most: float = math.inf
    warmup: int = 0
    step_bytes: float = 100.0
    file_bytes: float = 2_000.0
    weights: float = 4e6
    batch: int = 24
    learners: int = 1
    nodes: int = 0
    network: float = 1.25e9
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("collectors", "actors", "phase", "horizon", "epoch", "batch", "learners"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} of a Cluster must be at least 1, got {getattr(self, name)}")
        for name in ("step", "update", "most", "network"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of a Cluster must be above 0, got {getattr(self, name)}")
        if not 0 <= self.jitter < 0.5:
            raise ValueError(f"jitter must be in [0, 0.5), got {self.jitter}")
        if self.least > self.most:
            raise ValueError(f"least is {self.least:g}, above most, {self.most:g}")


def bundle_seconds(c: Cluster) -> float:
    """Longest time for which a finished file waits for others of its bundle."""
    return BUNDLE_SECONDS if c.nodes else LOCAL_SECONDS


def bus_seconds(c: Cluster) -> float:
    """Seconds between two looks of a node at its orders, and of the ingest at the bus."""
    return 1.0 if c.nodes else 0.1


# ---- costs of single events --------------------------------------------------------------------------------------------------


def load_seconds(c: Cluster, k: Constants) -> float:
    """A collector reads new weights."""
    return k.load + c.weights / k.load_rate


def publish_seconds(c: Cluster, k: Constants) -> float:
    """The learner publishes weights."""
    return k.publish + c.weights / k.publish_rate


def ingest_seconds(c: Cluster, k: Constants, files: int, size: float) -> float:
    """The learner's node takes one bundle of files with ``size`` bytes in all."""
    if not files:
        return 0.0
    each = k.move_file * files if not c.nodes else k.copy_file * files + size / k.copy_rate
    return k.call + each


def look_seconds(k: Constants, files: float, new: float) -> float:
    """The learner looks into a store of so many files, some of which are new."""
    return k.look + k.look_file * files + k.new_file * new


def look_period(seconds: float) -> float:
    """Seconds from one look to the next, as the learner decides after a look that took so long."""
    return max(LOOK_SECONDS, LOOKS_SHARE * seconds)


def update_seconds(c: Cluster, k: Constants) -> float:
    """An update, or the reading of its batches where that takes longer: each rank reads its own, from the same disk."""
    return max(c.update, c.learners * c.batch / k.read_rate)


# ---- rates -------------------------------------------------------------------------------------------------------------------


def phase_seconds(c: Cluster, k: Constants) -> float:
    """One phase of a collector that never pauses."""
    return load_seconds(c, k) + c.phase * c.step + k.phase


def collector_rate(c: Cluster, k: Constants) -> float:
    """Environment steps a second of one collector that never pauses."""
    return c.actors * c.phase / phase_seconds(c, k)


def learner_rate(c: Cluster, k: Constants, files: float = 0.0, new_a_second: float = 0.0) -> float:
    """Updates a second of a learner that never waits.

    Args:
        files: in its store.
        new_a_second: files that arrive.
    """
    period = LOOK_SECONDS
    for _ in range(20):  # the period depends on how many files are new in it
        seconds = look_seconds(k, files, new_a_second * period)
        period = look_period(seconds)
    free = max(0.0, 1.0 - seconds / period)
    last = look_seconds(k, files, 0.0)  # at the end of each epoch
    return free * c.epoch / (c.epoch * update_seconds(c, k) + publish_seconds(c, k) + k.epoch + last)


def file_steps(c: Cluster) -> float:
    """Environment steps in a file: a collector writes one in each phase."""
    return c.actors * c.phase


def ingest_rate(c: Cluster, k: Constants) -> float:
    """Environment steps a second that the learner's node can take, in full bundles."""
    size = file_steps(c) * c.step_bytes + c.file_bytes
    files = max(1, int(BUNDLE_BYTES / size))
    seconds = ingest_seconds(c, k, files, files * size)
    from_network = c.network / c.step_bytes if c.nodes else math.inf
    return min(from_network, files * file_steps(c) / seconds if seconds else math.inf)


def in_flight(c: Cluster, k: Constants, files: float = 0.0) -> float:
    """Environment steps that may be on their way to the store while the learner believes that collectors should go on: by so many
    steps, at most, the ratio of updates to steps may fall short of its least.

    These are a phase of each collector with its unfinished rollouts, and what it collects until an order to pause reaches it: an
    update or the end of an epoch in which the learner does not look, a look, a delivery, and the collector's own look at its orders.
    """
    look = look_seconds(k, files, 0.0)
    deaf = update_seconds(c, k) + publish_seconds(c, k) + k.epoch + 2 * look + look_period(look)
    size = file_steps(c) * c.step_bytes + c.file_bytes
    deliver = (
        bundle_seconds(c)
        + PUMP_SECONDS
        + 2 * bus_seconds(c)
        + c.collectors * ingest_seconds(c, k, 1, size)
        + (c.collectors * size / c.network if c.nodes else 0.0)
    )
    weights = load_seconds(c, k) + (c.nodes * c.weights / c.network)
    late = (1 + 2 * c.jitter) * (deaf + 2 * deliver + weights + k.phase + 2 * LOOK_SECONDS) / c.step + 2
    return c.collectors * c.actors * (c.phase + c.horizon + late)


@dataclass(frozen=True)
class Prediction:
    """The steady state of a run.

    Attributes:
        steps, updates: a second.
        ratio: of updates to steps.
        learner_waits, collectors_pause: shares of the time.
        lag_versions, lag_seconds: of the policy that acts, behind the newest; and since it was published.
        limit: what more of would make the run faster: "collectors", "learner", "ingest" or, between the limits, "both".
    """

    steps: float
    updates: float
    ratio: float
    learner_waits: float
    collectors_pause: float
    lag_versions: float
    lag_seconds: float
    limit: str


def predict(c: Cluster, k: Constants, files: float = 0.0) -> Prediction:
    """The steady state of a run.

    Args:
        files: in the learner's store, whose number grows with the run until its limit is reached.
    """
    alone = c.collectors * collector_rate(c, k)
    steps = min(alone, ingest_rate(c, k))
    fastest = learner_rate(c, k, files, steps / file_steps(c))
    updates, limit = fastest, "both" if steps == alone else "ingest"
    if fastest > c.most * steps:
        updates, limit = c.most * steps, "collectors" if steps == alone else "ingest"
    elif fastest < c.least * steps:
        steps, limit = fastest / c.least, "learner"
    per_version = c.epoch / updates if updates else math.inf
    cycle = phase_seconds(c, k) * alone / steps
    return Prediction(
        steps, updates, updates / steps, 1.0 - updates / fastest, 1.0 - steps / alone,
        cycle / 2 / per_version, cycle / 2 + per_version / 2, limit,
    )  # fmt: skip


def saturation(c: Cluster, k: Constants, files: float = 0.0) -> dict[str, float]:
    """How many collectors each resource can serve, the scarcest first.

    "learner waits" is the number of collectors below which the learner waits for data; "learner" that above which collectors pause.
    The others are numbers at which a resource is busy all the time: "reading" if updates took no time, "ingest", "weights" (one copy
    for each node in each epoch).
    """
    each = collector_rate(c, k)
    updates = learner_rate(c, k, files)
    needed = c.least if c.least else c.most
    found = {
        "learner": updates / (needed * each),
        "reading": k.read_rate / (c.learners * c.batch) / (needed * each),
        "ingest": ingest_rate(c, k) / each,
    }
    if c.most < math.inf:
        found["learner waits"] = updates / (c.most * each)
    if c.nodes:
        copies = c.network * c.epoch / updates / c.weights
        found["weights"] = copies * c.collectors / c.nodes
    return dict(sorted(found.items(), key=lambda item: item[1]))
