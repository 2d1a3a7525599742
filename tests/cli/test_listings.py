"""`amago list` and `amago doctor`: what they say is true of the library, of its docs and of this machine."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from messages import names
from run_inside import run_amago

from amago import config
from amago.cli import lists
from amago.cli.lists import ENTRIES, unmet, zoo
from amago.envs import builtin

ROOT = Path(__file__).parents[2]


def said(*words, code=0):
    outcome = run_amago(words, Path.cwd())
    assert outcome.code == code, outcome.text
    return outcome.text


def test_extras_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(lists.EXTRAS) == set(declared) - {"dev", "envs"}


@pytest.mark.parametrize(
    ("requirement", "lacks"),
    [
        ("numpy>=1.26", []), ("numpy>=99", ["numpy is not >=99"]), ("amago-lacks-this", ["amago-lacks-this is not installed"]),
        ("gymnasium[classic-control]", []),
    ],
)  # fmt: skip
def test_requirements(requirement, lacks):
    assert [re.sub(r"numpy [\d.]+", "numpy", text) for text in unmet(requirement)] == lacks


def lacking(monkeypatch, extra):
    """As if a package of an extra were not installed, a program and a library besides."""
    monkeypatch.setattr(lists, "unmet", lambda r: ["amago-lacks-this is not installed"] if r == f"amago[{extra}]" else unmet(r))
    monkeypatch.setitem(lists.PROGRAMS, extra, ("no-such-program", "make it"))
    monkeypatch.setitem(lists.LIBRARIES, extra, ("nosuchlibrary", "build it"))


def test_doctor(tmp_path):
    text = said("doctor", "--dir", str(tmp_path))
    assert "Nothing is wrong." in text
    for name in ("Python", "torch", "threads", "disk", "shared memory"):
        assert re.search(rf"^(ok|note) +{re.escape(name)} ", text, re.MULTILINE), name
    assert not list(tmp_path.iterdir()), "what was written to measure the disk is gone"
    assert re.search(r"^ok +numpy +fits", said("doctor", "--dir", str(tmp_path / "not" / "yet")), re.MULTILINE)


def test_what_is_needed_and_missing_is_a_problem(tmp_path, monkeypatch):
    lacking(monkeypatch, "video")
    text = said("doctor", "--need", "video", "--dir", str(tmp_path), code=1)
    lacks = ("amago-lacks-this is not installed", "the program no-such-program", "the library nosuchlibrary")
    assert names(text, "PROBLEM  video", *lacks, "pip install 'amago[video]'; make it; build it", "1 problems")
    assert names(said("list", "extras"), "video", *lacks, "pip install 'amago[video]'")
    assert "nonsense" in said("doctor", "--need", "nonsense", code=2)


def test_doctor_of_runs(tmp_path):
    for name in ("a", "b"):
        e = tiny.learned(tmp_path / name, name=name, ckpt_interval=1)
        e.close()
    config.bind({"Agent.tau": 0.5, "MambaTrajEncoder.d_state": 3})
    tiny.learned(tmp_path, tiny.cartpole, name="c", learning_rate=0.25, train_timesteps_per_epoch=40, ckpt_interval=1).close()
    a, b, c = (str(tmp_path / place) for place in ("a/a", "b/b", "c"))
    assert said("doctor", a, b) == "", "they differ in their names alone"
    assert sorted(said("doctor", a, c, code=1).splitlines()) == [
        "amago.agent.Agent.tau: 0.003 -> 0.5", "learning_rate: 0.001 -> 0.25", "make_train_env: tiny.tmaze -> tiny.cartpole",
        "make_val_env: tiny.tmaze -> tiny.cartpole", "train_timesteps_per_epoch: 12 -> 40",
    ]  # fmt: skip
    assert re.search(r"^ok +b_epoch_0 +complete", said("doctor", b), re.MULTILINE)
    (state,) = (e.run_dir / "ckpts" / "training_states").iterdir()
    (state / "model.safetensors").write_bytes(b"")
    assert re.search(r"^PROBLEM +b_epoch_0 ", said("doctor", b, code=1), re.MULTILINE)
    assert "settings.json" in said("doctor", str(tmp_path), code=2)


def test_every_environment_is_listed():
    """Those of `amago.envs.builtin`, and those of the page of benchmarks; wrappers and classes for code of the original are not."""
    environments, benchmarks = ((ROOT / "docs" / f"{p}.md").read_text(encoding="utf-8") for p in ("environments", "benchmarks"))
    own = {e.name for e in ENTRIES if e.extra is None}
    assert own == set(builtin.__all__) == set(re.findall(r"^\| \[`(\w+)`\]\(#", environments, re.MULTILINE))
    row = r"^\| \[[^]]+\]\(#[^)]+\) \| `(\w+)`[^|]* \| `amago\.envs\.builtin\.(\w+)` \| `examples/(\w+)\.py` \|$"
    documented = set(re.findall(row, benchmarks, re.MULTILINE))
    assert {(e.extra, e.module, e.example) for e in ENTRIES if e.extra is not None} == documented
    assert len({e.name for e in ENTRIES}) == len(ENTRIES) > 15


def test_entries_lead_somewhere():
    for entry, row in zip(ENTRIES, lists.environments(), strict=True):
        assert row["example"] is None or (ROOT / row["example"]).is_file()
        assert set(row["settings"]) <= set(config.zoo_files())
        assert entry.extra is None or entry.extra in lists.EXTRAS
        module, _, name = row["environment"].partition(":")
        assert getattr(importlib.import_module(module), name), "importing its module needs no extra"


def test_environments(monkeypatch):
    lacking(monkeypatch, "crafter")
    text = said("list", "envs")
    assert "spaces: Box(0.0, 1.0, (4,), float32) -> Discrete(5)" in text
    assert all(re.search(rf"^{entry.name} +\w", text, re.MULTILINE) for entry in ENTRIES)
    assert "amago.envs.builtin:RoomKeyDoor" in said("list", "envs", "roomkeydoor")
    assert names(said("list", "envs", "RoomKeyDoor"), "examples/05_dark_key_door.py", "zoo/solve_room")
    assert "did you mean RoomKeyDoor" in said("list", "envs", "RoomKeyDor", code=2)
    assert names(
        said("list", "envs", "CrafterInstructions"), "amago-lacks-this is not installed", "pip install 'amago[crafter]'"
    )


def test_a_reader_that_has_enough_or_was_never_there():
    command = [sys.executable, "-m", "amago.cli", "list", "zoo"]
    done = subprocess.run(
        f"{' '.join(command)} | head -1", shell=True, env=tiny.environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("zoo/")
    assert not done.stderr
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=tiny.environment(), text=True, **pipe) as running:
        running.stdout.close()
        assert not running.stderr.read()


@pytest.mark.parametrize("settings", list(zoo()), ids=lambda row: row["name"])
def test_what_settings_reached_is_in_the_docs(settings):
    """Each figure of a line "Reached: FIGURES (PAGE: ROW)" is in that row, or in those below it that go on with its task."""
    used = settings["used by"].split()[0].rstrip(",")
    assert used in ("amago", "python") or (ROOT / used).is_file()
    for reached in settings["reached"]:
        if reached in ("not measured", "not a task of its own"):
            continue
        claim, page, row = re.fullmatch(r"(.+?) \((docs/\w+\.md): (.+)\)", reached).groups()
        text = _rows((ROOT / page).read_text(encoding="utf-8"), row)
        figures = re.findall(r"-?\d+(?:\.\d+)?", claim)
        assert figures
        for figure in figures:
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d]|\.\d)", text), f"{figure} is not in {page}, {row}"


def _rows(text, label):
    """The rows of a table that begin with a label, and those after it whose first cell is empty."""
    found = re.findall(rf"^\| {re.escape(label)} \|.*(?:\n\| \|.*)*", text, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} rows are called {label!r}"
    return found[0]


def test_settings():
    text = said("list", "zoo")
    assert set(re.findall(r"^zoo/\w+", text, re.MULTILINE)) == set(config.zoo_files())
    assert "reached: return 500.0 and 500.0 (docs/results.md: CartPole-v1, mean return)" in text
    for name in ("cartpole", "zoo/cartpole", "cartpole.gin"):
        assert config.zoo_files()["zoo/cartpole"].read_text() in said("list", "zoo", name)
    assert "did you mean cartpole" in said("list", "zoo", "cartpol", code=2)
