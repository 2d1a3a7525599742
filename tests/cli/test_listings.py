"""`amago envs`, `amago zoo` and `amago doctor`: what they say is true of the library, of its docs and of this machine."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import tiny
from run_inside import run_amago

from amago import config
from amago.cli import checkup, extras
from amago.cli.catalog import ENTRIES
from amago.cli.envs import described
from amago.cli.extras import EXTRAS, Extra, missing, unmet
from amago.cli.zoo import all_settings, read_settings
from amago.envs import builtin

ROOT = Path(__file__).parents[2]


def said(*words, code=0):
    outcome = run_amago(words, Path.cwd())
    assert outcome.code == code, outcome.text
    return outcome.text


def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# ---- extras ----------------------------------------------------------------------------------------------------------------


def test_extras_are_those_of_the_package():
    declared = project()["optional-dependencies"]
    assert set(EXTRAS) == set(declared) - {"dev", "envs"}
    for name, extra in EXTRAS.items():
        assert list(extra.requires) == declared[name], name


def test_needs_are_those_of_the_package():
    assert list(checkup.NEEDS) == project()["dependencies"]
    assert project()["requires-python"] == checkup.PYTHON


@pytest.mark.parametrize(
    ("requirement", "lacks"),
    [
        ("numpy>=1.26", []),
        ("numpy>=99", [r"numpy [\d.]+ is not >=99"]),
        ("amago-lacks-this", ["amago-lacks-this is not installed"]),
        ("gymnasium[classic-control]", []),
    ],
)
def test_requirements(requirement, lacks):
    found = unmet(requirement)
    assert len(found) == len(lacks)
    assert all(re.fullmatch(pattern, text) for pattern, text in zip(lacks, found))


def test_extras_of_requirements_count(monkeypatch):
    monkeypatch.setattr(extras.importlib.metadata, "version", lambda name: {"outer": "2.0"}.get(name) or _absent(name))
    monkeypatch.setattr(
        extras.importlib.metadata, "requires", lambda name: ["always", 'inner>=3; extra == "x"', 'other; extra == "y"']
    )
    assert unmet("outer[x]") == ["inner is not installed"]
    assert unmet("outer") == []


def _absent(name):
    raise extras.importlib.metadata.PackageNotFoundError(name)


def test_programs_and_libraries_count(monkeypatch):
    lacking = Extra("tests", ("numpy",), (("no-such-program", "make it"),), (("nosuchlibrary", "build it"),))
    monkeypatch.setitem(EXTRAS, "tests", lacking)
    found = [(lack.what, lack.command) for lack in missing("tests")]
    assert found == [("the program no-such-program", "make it"), ("the library nosuchlibrary", "build it")]


# ---- doctor ----------------------------------------------------------------------------------------------------------------


def test_doctor(tmp_path):
    text = said("doctor", "--dir", str(tmp_path))
    assert "Nothing that every run needs is missing." in text
    for name in ("Python", "torch", "threads", "instructions", "writing", "shared memory", *EXTRAS):
        assert re.search(rf"^  (ok|note) +{re.escape(name)} ", text, re.MULTILINE), name
    assert not list(tmp_path.iterdir()), "what was written to measure the disk is gone"


def test_doctor_in_json(tmp_path):
    found = json.loads(said("doctor", "--json", "--dir", str(tmp_path / "not" / "yet")))
    assert found["problems"] == 0
    by_name = {f["name"]: f for f in found["findings"]}
    assert by_name["writing"]["state"] in ("ok", "note")
    assert re.match(r"[\d,]+ MB/s", by_name["writing"]["said"])
    for name, lacks in found["missing"].items():
        assert by_name[name]["state"] == ("note" if lacks else "ok")
        assert all(lack["command"] in by_name[name]["advice"] for lack in lacks)


def test_what_is_needed_and_missing_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setitem(EXTRAS, "video", Extra("films", ("amago-lacks-this>=2",)))
    text = said("doctor", "--need", "video", "--dir", str(tmp_path), code=1)
    assert re.search(r"PROBLEM  video +films: amago-lacks-this is not installed\n +-> pip install 'amago\[video\]'", text)
    assert "1 problems" in text
    assert "amago-lacks-this" in said("doctor", "--dir", str(tmp_path))
    assert "nonsense" in said("doctor", "--need", "nonsense", code=2)


def test_a_package_that_is_too_old_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(checkup, "NEEDS", ("torch>=2.5", "numpy>=99"))
    text = said("doctor", "--dir", str(tmp_path), code=1)
    assert re.search(r"PROBLEM  numpy +numpy [\d.]+ is not >=99\n +-> pip install 'numpy>=99'", text)


def test_a_disk_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    def refuse(place):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkup, "_write_speed", refuse)
    assert re.search(r"PROBLEM .*cannot be written to: Permission denied", said("doctor", "--dir", str(tmp_path), code=1))


def test_a_check_that_fails_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(checkup, "_memory", lambda: 1 / 0)
    (found,) = [f for f in checkup.checkup(tmp_path) if f.state == "problem"]
    assert "ZeroDivisionError" in found.said


def test_advice_on_threads():
    assert checkup._threads(2, 2.0).state == "ok"
    crowded = checkup._threads(16, 1.5)
    assert (crowded.state, crowded.advice) == ("note", "export OMP_NUM_THREADS=1")


# ---- envs ------------------------------------------------------------------------------------------------------------------


def test_every_environment_is_listed():
    """Those of `amago.envs.builtin`, and those of the benchmarks; wrappers and classes for code of the original system are not."""
    own = {e.name for e in ENTRIES if e.extra is None}
    assert own == set(builtin.__all__)
    assert own == set(re.findall(r"^\| \[`(\w+)`\]\(#", _page("environments.md"), re.MULTILINE))
    assert len({e.name for e in ENTRIES}) == len(ENTRIES)


def _page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_list_agrees_with_the_page_of_benchmarks():
    rows = re.findall(
        r"^\| \[[^]]+\]\(#([^)]+)\) \| `(\w+)`[^|]* \| `([\w.]+)` \| `([\w./]+)` \|$", _page("benchmarks.md"), re.MULTILINE
    )
    documented = set(rows)
    listed = {(e.docs.partition("#")[2], e.extra, e.module, e.example) for e in ENTRIES if e.extra is not None}
    assert len(documented) > 10
    assert listed == documented


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_entries_lead_somewhere(entry):
    page, _, anchor = entry.docs.partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
    assert entry.example is None or (ROOT / entry.example).is_file()
    assert {f"zoo/{name}" for name in entry.zoo} <= set(config.zoo_files())
    assert entry.extra is None or entry.extra in EXTRAS
    assert entry.extra is None or entry.spaces, "an environment that is not installed has its spaces in words"
    parameters = inspect.signature(entry.cls()).parameters
    assert set(entry.arguments) <= set(parameters)
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    assert not entry.made or required <= set(entry.arguments)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.extra is None], ids=lambda e: e.name)
def test_spaces_are_those_of_the_environment(entry):
    env = getattr(importlib.import_module(entry.module), entry.name)(**entry.arguments)
    found = described(entry)
    assert (found["observation_space"], found["action_space"]) == (str(env.observation_space), str(env.action_space))
    assert found["horizon"] == env.horizon
    assert found["installed"]


def test_the_table_of_environments():
    text = said("envs")
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("RoomKeyDoor"))
    assert lines[at + 1].split() == ["Box(0.0,", "1.0,", "(4,),", "float32)", "->", "Discrete(5)"]
    assert lines[at + 2].split() == ["examples/05_dark_key_door.py,", "zoo/solve_room"]
    for entry in ENTRIES:
        state = f"[{entry.extra}: {'not installed' if missing(entry.extra) else 'installed'}]" if entry.extra else ""
        assert re.search(rf"^{entry.name} .*{re.escape(state)}$", text, re.MULTILINE)


def test_one_environment():
    text = said("envs", "roomkeydoor")
    assert "amago.envs.builtin:RoomKeyDoor" in text
    assert "500 steps" in text
    (found,) = json.loads(said("envs", "RoomKeyDoor", "--json"))
    assert found["example"] == "examples/05_dark_key_door.py"
    assert found["zoo"] == ["zoo/solve_room"]
    assert "did you mean RoomKeyDoor" in said("envs", "RoomKeyDor", code=2)


def test_an_environment_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(EXTRAS, "crafter", Extra("Crafter", ("amago-lacks-this",)))
    text = said("envs", "CrafterInstructions")
    assert "no: amago-lacks-this is not installed" in text
    assert "pip install 'amago[crafter]'" in text
    assert "Discrete(17)" in text
    assert "CrafterInstructions" not in said("envs", "--installed")


def test_an_environment_that_breaks_does_not_hide_the_others(monkeypatch):
    def broken(self):
        raise RuntimeError("no display\nmore")

    monkeypatch.setattr("amago.cli.catalog.Entry.look", broken)
    text = said("envs")
    assert text.count("cannot be made: no display") >= 9
    assert "ToyMixture" in text


def test_a_reader_that_has_enough():
    command = f"{sys.executable} -m amago.cli envs | head -1"
    done = subprocess.run(command, shell=True, env=tiny.environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("MetaFrozenLake")
    assert not done.stderr


def test_a_reader_that_was_never_there():
    """The failed write leaves nothing behind that could be flushed."""
    command = [sys.executable, "-m", "amago.cli", "envs"]
    with subprocess.Popen(
        command, env=tiny.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        running.stdout.close()
        assert not running.stderr.read()


def test_it_trains_what_is_listed(tmp_path):
    """A name of the list, as "module:class", is what `amago train` takes."""
    entry = next(e for e in ENTRIES if e.name == "ToyMixture")
    from amago.cli.gym_env import GymEnv

    assert isinstance(GymEnv(f"{entry.module}:{entry.name}")().unwrapped, gym.Env)


# ---- zoo -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", all_settings(), ids=lambda s: s.name)
def test_what_settings_reached_is_in_the_docs(settings):
    """Each figure of a line "Reached: FIGURES (PAGE: ROW)" is in that row, or in those below it that go on with its task."""
    used = settings.used_by.split()[0].rstrip(",")
    assert used in ("amago", "python") or (ROOT / used).is_file()
    for reached in settings.reached:
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
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(f"| {label} |")]
    assert len(starts) == 1, f"{len(starts)} rows are called {label!r}"
    end = starts[0] + 1
    while end < len(lines) and lines[end].startswith("| |"):
        end += 1
    return "\n".join(lines[starts[0] : end])


def test_wrong_figures_would_be_noticed():
    settings = next(s for s in all_settings() if s.name == "zoo/cartpole")
    wrong = type(settings)(**{**vars(settings), "reached": (settings.reached[0].replace("500.0", "501.0"),)})
    with pytest.raises(AssertionError, match=r"501\.0 is not in docs/results\.md"):
        test_what_settings_reached_is_in_the_docs(wrong)


def test_the_list_of_settings():
    text = said("zoo")
    assert set(re.findall(r"^zoo/\w+", text, re.MULTILINE)) == set(config.zoo_files())
    assert "reached: return 500.0 and 500.0 (docs/results.md: CartPole-v1, mean return)" in text
    found = json.loads(said("zoo", "--json"))
    assert [s["name"] for s in found] == list(config.zoo_files())


@pytest.mark.parametrize("name", ["cartpole", "zoo/cartpole", "cartpole.gin"])
def test_one_file(name):
    assert config.zoo_files()["zoo/cartpole"].read_text() in said("zoo", name)


def test_no_such_settings():
    assert "did you mean zoo/cartpole" in said("zoo", "cartpol", code=2)


def test_a_file_without_its_head_is_refused(tmp_path):
    (tmp_path / "a.gin").write_text("# Task: x\nAgent.tau = 1\n")
    with pytest.raises(ValueError, match=r"lacks the lines # Used by: \.\.\., # Reached: \.\.\."):
        read_settings("zoo/a", tmp_path / "a.gin")
