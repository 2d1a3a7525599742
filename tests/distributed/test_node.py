"""The collectors of a node that does not share the learner's disk, over any link."""

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import tiny

from amago.distributed import Answer, Ingest, LocalLink
from amago.distributed.children import Patience
from amago.distributed.node import Node, Orders
from amago.distributed.place import Task

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))
from fault_helpers import count, report

PROGRAM = Path(__file__).parent / "node_program.py"


class Center:
    """The learner's node: it counts what arrives, and refuses everything while it is cut off."""

    def __init__(self, root):
        self.store, self.inbox = root / "buffer" / "fifo", root / "reports"
        self.ingest = Ingest(self.store, self.inbox)
        self.link = LocalLink(self.ingest, lambda beats: Answer(self.version, self.pause))
        self.version, self.pause, self.cut, self.states, self.calls = 1, False, False, {}, 0

    def put(self, parcels, beats):
        self._reach()
        for parcel in parcels:
            assert parcel.path is None, "the other node cannot read this disk"
            if parcel.kind == "state":
                self.states[parcel.name] = parcel.data
        return self.link.put([parcel for parcel in parcels if parcel.kind != "state"], beats)

    def weights(self):
        self._reach()
        return str(self.version).encode()

    def _reach(self):
        self.calls += 1
        if self.cut:
            raise OSError("no route to host")

    @property
    def arrived(self):
        return list(self.ingest.arrived)


class Running:
    """A node whose two threads run."""

    def __init__(self, center, home, *words, launch="one", **patience):
        self.center, self.wrong = center, []
        task = Task([str(PROGRAM), *words], 0.0, None, Patience(**patience), tiny.environment())
        self.node = Node(center, task, home, "run", "id", launch)
        self.ends = threading.Event()
        self.threads = [threading.Thread(target=self._repeat, args=(step,)) for step in (self.node.watch, self.node.pump)]
        for thread in self.threads:
            thread.start()

    def _repeat(self, step):
        while not self.ends.is_set():
            try:
                step()
            except Exception as err:
                self.wrong.append(err)
                return
            time.sleep(0.01)

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert not self.wrong, self.wrong
            assert time.monotonic() < deadline, f"{condition} did not become true; {self.node.status()}"
            time.sleep(0.01)

    def beat(self, index):
        return self.node.status().beats.get(f"collector-{index}", {})

    def end(self):
        self.node.obey(Orders(end=True))
        self.until(lambda: not self.node.status().run and not self.node.status().left)
        self.kill()

    def kill(self):
        self.ends.set()
        for thread in self.threads:
            thread.join()
        self.node.close()


@pytest.fixture
def center(tmp_path):
    return Center(tmp_path / "learner")


@pytest.fixture
def start(center, tmp_path):
    started = []

    def make(*words, home="node", **options):
        started.append(Running(center, tmp_path / home, *words, **options))
        return started[-1]

    yield make
    for each in started:
        each.kill()


def test_it_runs_the_collectors_that_it_is_told_to_run(start, center):
    node = start()
    node.node.obey(Orders(frozenset({2, 5})))
    node.until(lambda: node.beat(2).get("steps") and node.beat(5).get("steps"))
    node.node.obey(Orders(frozenset({5, 7})))
    node.until(lambda: node.beat(7).get("steps") and node.node.status().run == 2)
    assert node.node.status().collectors == {5, 7}
    node.end()
    written = Counter(name.partition("-")[0] for name in center.arrived)
    assert len(written) == 3
    for writer, files in written.items():
        assert f"{writer}-{files:012d}-n1.safetensors" in center.arrived, "the last that it wrote has arrived"
    assert len(list(center.inbox.iterdir())) == len(center.arrived)


def test_weights_and_pauses_reach_its_collectors(start, center):
    center.version = 3
    node = start()
    node.node.obey(Orders(frozenset({0})))
    node.until(lambda: node.beat(0).get("version") == 3)
    center.version = 4
    node.until(lambda: node.beat(0).get("version") == 4)
    center.version = 2  # an ingest that has just been started again may not know better
    time.sleep(0.3)
    assert node.beat(0)["version"] == 4
    center.pause = True
    node.until(lambda: node.beat(0).get("paused"))
    center.pause = False
    node.until(lambda: not node.beat(0).get("paused"))


def test_a_partition_loses_nothing_and_collection_goes_on(start, center):
    seconds = count(3, 60)
    node = start()
    node.node.obey(Orders(frozenset({0, 1})))
    node.until(lambda: node.beat(0).get("steps") and node.beat(1).get("steps"))
    center.cut = True
    time.sleep(0.2)
    arrived, steps, version = len(center.arrived), node.beat(0)["steps"], center.version
    center.version += 1
    time.sleep(seconds)
    assert len(center.arrived) == arrived
    assert node.beat(0)["steps"] > steps
    assert node.beat(0)["version"] == version, "with the weights that it has"
    center.cut = False
    node.until(lambda: len(center.arrived) > arrived and node.beat(0)["version"] == version + 1)
    node.end()
    assert len(center.arrived) == sum(
        int(name.split("-")[1]) == i + 1
        for writer in {n.partition("-")[0] for n in center.arrived}
        for i, name in enumerate(sorted(n for n in center.arrived if n.startswith(writer)))
    ), "none is missing"
    report(f"partitions of {seconds} s between a node and the learner's: nothing lost", 1, 1)


def test_a_node_that_starts_again_in_the_same_launch_uses_the_weights_that_it_has(start, center):
    node = start()
    node.node.obey(Orders(frozenset({0})))
    node.until(lambda: node.beat(0).get("steps"))
    center.cut = True
    node.kill()
    again = start()
    again.node.obey(Orders(frozenset({0})))
    again.until(lambda: again.beat(0).get("steps"))
    again.kill()
    other = start(launch="two")
    other.node.obey(Orders(frozenset({0})))
    other.until(lambda: other.node.status().run == 1)
    time.sleep(0.5)
    assert not other.beat(0), "weights of an earlier launch may be of other networks"
    center.cut = False
    other.until(lambda: other.beat(0).get("steps"))


def test_what_a_dead_node_has_left_is_delivered_by_the_next_one_with_its_directory(start, center):
    node = start()
    node.node.obey(Orders(frozenset({0})))
    node.until(lambda: node.beat(0).get("steps"))
    center.cut = True
    time.sleep(0.3)
    node.kill()
    left = [p.name for p in (node.node.run_dir / "launch" / "collector-0" / "spool" / "buffer" / "fifo").iterdir()]
    assert left
    center.cut = False
    again = start(launch="two")
    again.until(lambda: set(left) <= set(center.arrived))
    assert again.node.run_dir == node.node.run_dir


def test_two_nodes_with_one_home_have_directories_of_their_own(start):
    a, b = start(), start()
    assert a.node.run_dir != b.node.run_dir
    assert a.node.number != b.node.number
    a.kill()
    c = start()
    assert c.node.run_dir == a.node.run_dir


def test_exploration_goes_on_where_another_node_has_left_off(start, center):
    node = start()
    node.node.obey(Orders(frozenset({4})))
    node.until(lambda: "collector-4" in center.states and json.loads(center.states["collector-4"])["left"] < 990)
    node.end()
    state = center.states["collector-4"]
    center.states.clear()
    other = start(home="elsewhere")
    other.node.obey(Orders(frozenset({4}), {4: state}))
    other.until(lambda: "collector-4" in center.states and center.states["collector-4"] != state)
    assert 0 < json.loads(center.states["collector-4"])["left"] < json.loads(state)["left"]


def test_collectors_that_never_start_are_its_failure(start):
    node = start("break", first=0.01)
    node.node.obey(Orders(frozenset({0})))
    node.until(lambda: node.node.status().failure)
    assert "no display is there" in node.node.status().failure
    node.until(lambda: node.node.status().run == 0)


def test_news_is_told_until_the_launcher_has_it(start):
    node = start()
    node.node.say("one")
    node.node.say("two")
    assert (node.node.status().first, node.node.status().news) == (0, ["one", "two"])
    node.node.obey(Orders(seen=1))
    assert (node.node.status().first, node.node.status().news) == (1, ["two"])
    node.node.obey(Orders(seen=1))
    assert node.node.status().news == ["two"]
