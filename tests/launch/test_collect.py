"""A learner and collectors that have only a bus in common."""

import os
import signal
import time

import pytest
from fault_helpers import children_of
from launching import RUN, stop
from run_inside import refusal

from amago.launch.bus import Bus
from amago.launch.launcher import Leader, check_lease


@pytest.fixture
def collect(launch, tmp_path):
    """Starts ``amago collect``."""

    def start(name, collectors=1, **fields):
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        options = "--bus", str(tmp_path / "bus"), "--node-dir", str(root / "node")
        return launch(*options, root=root, collectors=collectors, command="collect", **RUN | fields)

    return start


def left(tmp_path):
    """Files that are not delivered."""
    return [p for p in tmp_path.glob("*/node/*/*/bundles/*/*") if p.is_file()] + list((tmp_path / "bus").glob("out/*/*"))


def test_collectors_that_come_go_and_are_killed_lose_and_double_nothing(launch, collect, tmp_path):
    """One is there before the launch, one comes late and is killed with its collectors, and the learner is started twice."""
    early = collect("early", val_interval=1)
    run = launch("--bus", str(tmp_path / "bus"), collectors=0, val_interval=1, **RUN)
    run.until(lambda: run.rows("rollout") and run.rows("val") and len(run.rows("train")) > 2)
    late = collect("late", collectors=2)
    run.until(lambda: len(late.children) == 2 and all(late.beat(f"collector-{i}").get("steps") for i in (0, 1)))
    run.until(lambda: len({name.rpartition("-n")[0].rpartition("-")[0] for name in run.arrived[1]}) >= 3)  # writers
    late.process.kill()
    late.process.communicate()
    stop(run)
    assert early.wait() == 0, "it ends with the launch"
    again = launch("--bus", str(tmp_path / "bus"), collectors=0, **RUN)
    late = collect("late", collectors=2)
    before = again.arrived[0]
    again.until(lambda: again.arrived[0] > before + 10 and late.children)
    late.process.send_signal(signal.SIGTERM)
    assert late.wait() == 143
    stop(again)
    assert left(tmp_path) == []
    rollouts, files = again.arrived
    assert len(files) == len(set(files))
    assert rollouts > before


def test_a_killed_launch_is_followed_by_another_on_the_same_bus(launch, collect, tmp_path):
    node = collect("node")
    run = launch("--bus", str(tmp_path / "bus"), collectors=0, **RUN | {"ckpt_interval": 1})
    run.until(lambda: len(run.rows("train")) > 3)
    run.process.kill()
    run.process.communicate()
    done = len(run.rows("train"))
    again = launch("--bus", str(tmp_path / "bus"), collectors=0, **RUN)
    again.until(lambda: len(again.rows("train")) > done + 3)
    assert node.process.poll() is None
    assert len(children_of(node.process.pid)) == 2, "a collector, and the process that sees to its end"
    stop(again)
    assert node.wait() == 0


def test_a_machine_that_is_silent_is_gone_and_may_come_back(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bus = Bus(str(tmp_path / "bus"))
    remote = Leader(bus)
    beat = {"count": 1, "host": "cpu1", "ended": False, "waiting": 7, "replaced": 2, "failure": "", "collectors": {}}
    bus.put("beat/cpu1-1.json", beat)
    remote.read_beats()
    assert remote.nodes == {"cpu1-1": beat}
    for now[0] in (50.0, 61.0, 62.0):
        remote.read_beats()
    assert remote.nodes == {}
    assert capsys.readouterr().err.count("cpu1 has given no sign") == 1
    bus.put("beat/cpu1-1.json", beat | {"count": 2})
    remote.read_beats()
    assert capsys.readouterr().err == "cpu1 is back\n"
    assert remote.nodes
    bus.put("beat/cpu1-1.json", beat | {"count": 3, "ended": True})
    remote.read_beats()
    assert remote.nodes == {}
    assert bus.names("beat") == []


@pytest.mark.parametrize("other", ["another-machine", "lives", "was-killed", "is-over"])
def test_a_bus_that_another_launch_leads_is_refused(tmp_path, other):
    import socket

    bus = Bus(str(tmp_path / "bus"))
    pid = {"lives": os.getppid(), "was-killed": 2**22 + 5}.get(other, 1)
    host = "elsewhere" if other == "another-machine" else socket.gethostname()
    until = time.time() + (-1 if other == "is-over" else 3600)
    bus.put("orders.json", {"lease": {"host": host, "pid": pid, "until": until}})
    if other in ("was-killed", "is-over"):
        check_lease(bus)
        return
    with pytest.raises(ValueError, match="another launch, pid"):
        check_lease(bus)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", __file__], "give --collectors N, or --bus URL"),
        (["launch", "--collectors", "1", "--ray", "auto", __file__], "give --bus URL"),
        (["launch", "--collectors", "0", __file__], "--collectors must be at least 1, got 0"),
        (["launch", "--collectors", "1", "--learners", "0", __file__], "--learners must be at least 1, got 0"),
        (["collect", "--bus", "nowhere://x", "--collectors", "1", __file__], "nowhere"),
        (["collect", "--bus", "/tmp/x", "--collectors", "0", __file__], "--collectors must be at least 1"),
        (["collect", "--bus", "/tmp/x", "--collectors", "1", "absent.py"], "which is not a file"),
    ],
)
def test_mistakes_in_the_arguments_are_said(words, message, capsys):
    assert message in refusal(capsys, *words)


def test_ray_without_a_token_is_refused(monkeypatch, capsys, tmp_path):
    import sys
    import types

    ray = types.ModuleType("ray")
    words = ["launch", "--bus", str(tmp_path / "bus"), "--collectors", "1", "--ray", "auto", __file__]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'amago[ray]'" in refusal(capsys, *words)
    ray.__version__ = "2.60.0"
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert "RAY_AUTH_MODE=token" in refusal(capsys, *words)
