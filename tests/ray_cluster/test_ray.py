"""Ray as the starter of collectors: placed on its nodes, and started again elsewhere."""

import os
import signal
from pathlib import Path

from fault_helpers import assert_gone
from launching import RUN, stop


def collects(root):
    """Processes of ``amago collect`` on this launch's bus."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if "collect" in words and f"--bus={root / 'bus'}" in words:
            found.append(int(pid))
    return found


def test_collectors_run_on_the_nodes_and_are_started_again(cluster, launch, tmp_path):
    run = launch("--bus", str(tmp_path / "bus"), "--ray", cluster.address, collectors=4, **RUN)
    run.until(lambda: len(collects(tmp_path)) == 1 and run.rows("rollout"))
    cluster.order("add")
    run.until(lambda: len(collects(tmp_path)) == 2)
    killed = collects(tmp_path)[0]
    os.kill(killed, signal.SIGKILL)
    run.until(lambda: len(collects(tmp_path)) == 2 and killed not in collects(tmp_path))
    before = run.arrived[0]
    run.until(lambda: run.arrived[0] > before + 10)
    everyone = collects(tmp_path)
    stop(run)
    assert_gone(everyone)
    assert "Ray has 2 cores for 4 collectors" in run.output


def test_a_cluster_of_another_token_is_refused(cluster, launch, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "cd" * 32)
    run = launch("--bus", str(tmp_path / "bus"), "--ray", cluster.address, collectors=2, **RUN)
    assert run.wait() != 0
