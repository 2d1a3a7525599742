"""What `--ray` says without a cluster, and without Ray."""

import os
import sys
import types

import pytest

from amago import cli
from amago.distributed.api import command

SCRIPT = os.path.abspath(__file__)


@pytest.mark.parametrize("ray", [None, types.ModuleType("ray")], ids=["not-installed", "a-directory-of-this-name"])
def test_without_ray_the_error_names_the_extra(monkeypatch, capsys, ray):
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert cli.main(["launch", "--collectors", "1", "--ray", "auto", SCRIPT]) == 2
    assert "pip install 'amago[ray]'" in capsys.readouterr().err


def test_a_directory_of_nodes_without_nodes_is_refused(capsys):
    assert cli.main(["launch", "--collectors", "1", "--node-dir", "/x", SCRIPT]) == 2
    assert "--node-dir is of no use without --ray" in capsys.readouterr().err


def test_from_python_and_from_scripts_the_options_reach_the_launcher():
    words = command("train.py", ["--lr", "1"], 4, ray="auto", node_dir="$SCRATCH/x")
    assert words[words.index("--ray") + 1] == "auto"
    assert "--node-dir=$SCRATCH/x" in words
    assert words[-3:] == ["train.py", "--lr", "1"]
    assert "--ray" not in command("train.py", [], 4)
