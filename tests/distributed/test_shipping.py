"""What of the user's files reaches other machines."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amago.distributed import shipping
from amago.distributed.shipping import pack


def write(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def names(directory):
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory as users have it."""
    root = tmp_path / "project"
    for name in (
        "train.py", "maze/levels.py", "maze/one.txt", "conf/small.gin", "data/big.npz", ".git/config", ".env", "__pycache__/x.pyc",
        ".venv/pyvenv.cfg", "env/pyvenv.cfg", "env/lib.py", "runs/first/settings.json", "runs/first/policy.json", "runs/set/buffer/fifo/a",
        "wandb/log", "policy.pt", "a.safetensors", "package.egg-info/x", "result.log",
    ):  # fmt: skip
        write(root / name)
    monkeypatch.chdir(root)
    return root


def test_the_script_and_what_lies_beside_it_without_runs_environments_and_repositories(project, tmp_path):
    words = pack(["train.py", "--run_name", "a"], tmp_path / "sent")
    assert words == ["train.py", "--run_name", "a"]
    assert names(tmp_path / "sent") == ["conf/small.gin", "data/big.npz", "maze/levels.py", "maze/one.txt", "train.py"]


def test_a_script_in_a_subdirectory_keeps_its_place_and_files_that_arguments_name_come_with_it(project, tmp_path):
    words = pack(["maze/levels.py", "--configs", "conf/small.gin", "--other=train.py", "--lr", "0.1"], tmp_path / "sent")
    assert words[0] == "maze/levels.py"
    assert names(tmp_path / "sent") == ["conf/small.gin", "maze/levels.py", "maze/one.txt", "train.py"]


def test_a_script_elsewhere_is_called_by_its_name(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pack([str(project / "train.py")], tmp_path / "sent") == ["train.py"]
    assert "maze/levels.py" in names(tmp_path / "sent")


def test_a_module_of_the_current_directory_and_one_that_is_installed(project, tmp_path):
    assert pack(["-m", "maze.levels", "x"], tmp_path / "a") == ["-m", "maze.levels", "x"]
    assert "maze/levels.py" in names(tmp_path / "a")
    pack(["-m", "amago.cli", "train", "conf/small.gin"], tmp_path / "b")
    assert names(tmp_path / "b") == ["conf/small.gin"]


def test_too_much_is_refused_with_the_largest_files(project, tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "MOST_BYTES", 1 << 20)
    write(project / "data" / "huge.npz", bytes(3 << 20))
    with pytest.raises(ValueError, match=re.escape("data/huge.npz (3 MB)")):
        pack(["train.py"], tmp_path / "sent")
    assert not (tmp_path / "sent").exists()


def test_a_script_that_collects_itself_is_found_once(project, tmp_path):
    pack([str(project / "train.py"), "train.py"], tmp_path / "sent")
    assert names(tmp_path / "sent").count("train.py") == 1


def test_a_node_keeps_what_ray_may_delete(tmp_path, monkeypatch):
    sent = tmp_path / "session" / "runtime_resources"
    (sent / "files").mkdir(parents=True)
    (sent / "files" / "train.py").write_text("print('runs')")
    (sent / "modules" / "library").mkdir(parents=True)
    (sent / "modules" / "library" / "__init__.py").write_text("here = __file__")
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(sent / "files")
    entries = [sent / "files", sent / "modules", own]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, entries)))
    monkeypatch.setattr(sys, "path", [*sys.path, str(sent / "modules")])
    target = tmp_path / "node" / "program"
    target.mkdir(parents=True)
    (target / "old").touch()
    shipping.keep(target)
    shutil.rmtree(sent)
    assert not (target / "old").exists()
    assert Path.cwd().is_relative_to(target)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[2] == str(own)
    code = "import runpy, library; runpy.run_path('train.py'); print(library.here)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "runs"
    assert Path(said[1]).is_relative_to(target)
    assert any(Path(entry).is_relative_to(target) for entry in sys.path)
