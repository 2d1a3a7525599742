"""Collectors on several nodes, whose processes are killed or cut off: nothing is lost, nothing arrives twice, nobody is left behind."""

import contextlib
import os
import signal
import time

from clusters import Cluster, kill
from fault_helpers import count, report, rng, say
from launching import alive

FOREVER = 1_000_000
SETTINGS = {"epochs": FOREVER, "train_batches_per_epoch": 2, "ckpt_interval": FOREVER, "resume": "auto"}


def stop(run):
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output


def goes_on(run, files=4):
    """Wait until more files have arrived."""
    before = len(run.arrived)
    run.until(lambda: len(run.arrived) >= before + files)


def test_ingest_killed_while_nodes_deliver(cluster):
    """Nothing lost, nothing twice; the versions of the policies with which collectors act never fall."""
    wanted, random = count(3, 20), rng("ray ingest")
    cluster.add("a")
    run = cluster.launch(collectors=2, **SETTINGS)
    run.until(lambda: len(run.collecting()) == 2)
    versions, killed = {}, 0
    for _ in range(wanted):
        goes_on(run)
        until = time.monotonic() + float(random.uniform(0, 1))
        while time.monotonic() < until:
            for i, beat in run.collector_beats().items():
                assert beat["version"] >= versions.get(i, 0)
                versions[i] = beat["version"]
        (pid,) = cluster.pids("IngestActor")
        kill(pid)
        killed += 1
        run.until(lambda: cluster.pids("IngestActor") not in ([], [pid]))  # noqa: B023
    goes_on(run)
    stop(run)
    run.check_nothing_is_lost_or_twice()
    say(f"{len(run.arrived)} files; versions {versions}")
    report("ingest actors killed: nothing lost, nothing twice, versions never fall", killed, wanted)


def test_agents_and_collectors_killed(cluster):
    """A killed agent takes its collectors with it; both are started again on the same node, and deliver what was there."""
    wanted, random = count(2, 40), rng("ray agents")
    cluster.add("a")
    run = cluster.launch(collectors=3, **SETTINGS)
    run.until(lambda: len(run.collecting()) == 3)
    killed = 0
    for i in range(wanted):
        time.sleep(float(random.uniform(0, 1)))
        before = run.collector_pids()
        if i % 2:
            index = int(random.choice(list(before)))
            kill(before[index])
            run.until(lambda: run.collector_pids().get(index) not in (None, before[index]))  # noqa: B023
        else:
            agents = cluster.pids("NodeAgent")
            kill(int(random.choice(agents)))
            run.until(lambda: len(run.collector_pids()) == 3 and run.collector_pids() != before)  # noqa: B023
        run.until(lambda: len(run.collecting()) == 3)
        killed += 1
    goes_on(run)
    stop(run)
    run.check_nothing_is_lost_or_twice()
    report("agents and collectors of nodes killed: nothing lost, nothing twice", killed, wanted)


def test_a_partition_between_nodes_and_ingest(cluster):
    """While the ingest actor answers nobody, collection goes on; afterwards everything arrives, once."""
    seconds = count(6, 60)
    cluster.add("a")
    run = cluster.launch(collectors=2, **SETTINGS)
    run.until(lambda: len(run.collecting()) == 2)
    goes_on(run)
    (pid,) = cluster.pids("IngestActor")
    os.kill(pid, signal.SIGSTOP)
    try:
        arrived, steps = len(run.arrived), run.collecting()
        time.sleep(seconds)
        assert len(run.arrived) == arrived
        assert all(n > steps[i] for i, n in run.collecting().items()), "collection goes on"
        assert run.process.poll() is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    goes_on(run)
    stop(run)
    run.check_nothing_is_lost_or_twice()
    report(f"partitions of {seconds} s", 1, 1)


def test_nodes_removed(cluster):
    """Of a node that loses its power, only what it had not delivered is missing; its collectors start elsewhere."""
    wanted, random = count(1, 5), rng("ray nodes")
    cluster.add("stays")
    run = cluster.launch(collectors=3, **SETTINGS)
    run.until(lambda: len(run.collecting()) == 3)
    removed = [f"removed{i}" for i in range(wanted)]
    left = 0
    for name in removed:
        cluster.add(name)
        run.until(lambda: cluster.directories(name) and len(run.collecting()) == 3)  # noqa: B023
        goes_on(run)
        time.sleep(float(random.uniform(0, 2)))
        cluster.remove(name)
        run.until(lambda: set(run.collecting()) == {0, 1, 2})
        goes_on(run)
        undelivered = {
            p.name for d in cluster.directories(name).values() for p in (d / "spool" / "buffer" / "fifo").glob("[!.]*")
        }
        left += len(undelivered - set(run.arrived))
    stop(run)
    run.check_nothing_is_lost_or_twice(except_nodes=removed)
    assert run.output.count("is gone; ") == wanted
    say(f"{len(run.arrived)} files arrived; {left} wait on the nodes that were removed")
    report("nodes removed: what they had not delivered is missing, and nothing else", wanted, wanted)


def test_launcher_killed_and_started_again(cluster):
    """All its processes on all nodes end, and the same command goes on, with what was left on the nodes."""
    wanted, slowest = count(1, 5), 0.0
    cluster.add("a")
    for _ in range(wanted):
        run = cluster.launch(collectors=2, **SETTINGS)
        run.until(lambda: len(run.collecting()) == 2)  # noqa: B023
        everyone = {
            *run.children.values(),
            *run.collector_pids().values(),
            *cluster.pids("NodeAgent"),
            *cluster.pids("IngestActor"),
        }
        assert len(everyone) == 7
        run.process.kill()
        run.process.communicate()
        began = time.monotonic()
        while alive(everyone) and time.monotonic() < began + count(30, 10):
            time.sleep(0.05)
        slowest = max(slowest, time.monotonic() - began)
        assert not alive(everyone)
    run = cluster.launch(collectors=2, **SETTINGS)
    run.until(lambda: len(run.collecting()) == 2)
    goes_on(run)
    stop(run)
    run.check_nothing_is_lost_or_twice()
    say(f"all ended after {slowest:.2f} s at most")
    report("launchers killed: nobody left on any node, and the same command goes on", wanted, wanted)


def test_a_lost_cluster_does_not_end_the_learner_and_is_found_again(cluster, tmp_path):
    """Ray ends whoever cannot reach the head of its cluster for a minute; the learner goes on."""
    run = cluster.launch(collectors=1, **SETTINGS)
    run.until(lambda: len(run.collecting()) == 1 and run.rows("train"))
    before = run.children
    (head,) = cluster.pids("gcs_server")
    kill(head)
    run.until(lambda: before["nodes"] not in run.children.values(), seconds=150)
    updates = run.rows("train")[-1]["grad_steps"]
    run.until(lambda: run.rows("train")[-1]["grad_steps"] > updates)
    cluster.end_nodes()
    again = Cluster(tmp_path, cluster.address.rpartition(":")[2])
    try:
        run.cluster = again
        run.until(lambda: len(run.collecting()) == 1)
        goes_on(run)
        assert run.children["learner"] == before["learner"]
        stop(run)
    finally:
        again.end()
    run.check_nothing_is_lost_or_twice()
    assert "the Ray cluster is lost, and the learner goes on" in run.output
    assert list((run.run_dir / "ckpts" / "training_states").iterdir())
    report("clusters lost: the learner goes on, and uses a new one at the same address", 1, 1)
