import importlib.util
import pathlib
import subprocess
import sys

import pytest
import tiny
from launching import launch  # noqa: F401

HERE = pathlib.Path(__file__).parent
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster, nodes = Cluster(initialize_head=True, head_node_args=node), []
print(cluster.address, flush=True)
for line in sys.stdin:
    nodes.append(cluster.add_node(**node)) if line == "add\\n" else cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""


def pytest_collection_modifyitems(items):
    spec = importlib.util.find_spec("ray")
    missing = spec is None or spec.origin is None  # a directory of this name is no package, and Ray's own in /tmp has it
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.timeout(1800))
            if missing:
                item.add_marker(pytest.mark.skip(reason="Ray is not installed: make test-ray"))


class Cluster:
    """A cluster of nodes on this machine that asks for a token."""

    def __init__(self, log):
        self._log = open(log, "w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.address = self.process.stdout.readline().strip()
        assert self.address, log.read_text()

    def order(self, what):
        """Add a node, or remove one as if it lost its power."""
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self):
        self.process.stdin.close()
        self.process.wait(600)
        self.process.stdout.close()
        self._log.close()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "ab" * 32,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "600",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", tiny.environment()["PYTHONPATH"])
    made = Cluster(tmp_path / "cluster.log")
    yield made
    made.end()
