"""A second checkout of this package, measured in turns with the first."""

import shutil
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "amago"
BINDINGS = {"FFTrajEncoder.d_model": 16, "FFTstepEncoder.d_hidden": 16, "FFTstepEncoder.d_output": 16}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the package that says where it was imported."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PACKAGE, folder / "amago", ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "amago" / "__init__.py", "a") as f:
        f.write(f"\nopen({str(folder / 'imported')!r}, 'w').close()\n")
    return folder


def test_each_row_has_both(smoke, checkout):
    rows = smoke("policy_step", "--only", "Transformer", "--peer", str(checkout), "--peer-python", sys.executable)
    assert [row["peer"] is not None for row in rows.values()] == [True]
    assert (checkout / "imported").exists(), "the copy was measured, not the package that is installed"


def test_collecting(smoke, checkout):
    rows = smoke("rollout", "--only", "CartPole, Transformer, recorded", "--peer", str(checkout))
    assert [row["peer"] is not None for row in rows.values()] == [True]


@pytest.mark.parametrize("agent", ["Agent", "MultiTaskAgent"])
def test_an_update(smoke, checkout, agent):
    from benchmarks.peer import Peer

    case = {
        "benchmark": "learner", "threads": 1, "seconds": 0.0, "traj": "FF", "context": 4, "actors": 2, "bindings": BINDINGS, "env": "noise",
        "obs_shape": [5], "episode": 4, "action_width": 2, "agent": agent, "batch": 3,
    }  # fmt: skip
    peer = Peer(str(checkout), sys.executable, case)
    try:
        assert 0.0 < peer() < 60.0
        assert 0.0 < peer() < 60.0
    finally:
        peer.close()
    assert peer._process.returncode == 0


def test_what_goes_wrong_there_is_told(smoke, tmp_path):
    from benchmarks.peer import Peer, PeerError

    (tmp_path / "amago").mkdir()
    (tmp_path / "amago" / "__init__.py").write_text("raise ImportError('no such peer')")
    case = {"benchmark": "policy_step", "threads": 1, "traj": "FF"}
    with pytest.raises(PeerError, match="no such peer"):
        Peer(str(tmp_path), sys.executable, case)
    (tmp_path / "amago" / "__init__.py").write_text(
        "import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(3)"
    )
    with pytest.raises(PeerError, match="last words"):
        Peer(str(tmp_path), sys.executable, case)
