"""Every program and command of README.md and docs/ runs, and every link leads somewhere.

A section (a heading of level two and all below it) is one program: its blocks run in order, in one directory and one
namespace. Sizes are reduced: by gin where a block uses defaults, by `REDUCED` where it sets values, by extra arguments for
commands. ``<!-- no test: reason -->`` on the line above a block leaves the block out.
"""

import ast
import re
import shlex
import subprocess
import sys
import types
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
from run_inside import Outcome, program, run_amago, run_script

from amago import Experiment
from amago.agent.agent import AGENTS
from amago.nets.traj_encoders import TRAJ_ENCODERS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "gin", "yaml", "bibtex", ""}

REDUCED: dict[str, dict[str, str]] = {
    "README.md": {"steps=100_000": "steps=400, epochs=1, grads_per_epoch=2, parallel_actors=2"},
    "index.md": {
        "steps=100_000": "steps=400, epochs=1, grads_per_epoch=2, parallel_actors=2", "epochs=20": "epochs=1",
        "val_timesteps_per_epoch=1_000": "val_timesteps_per_epoch=60", "timesteps=5_000": "timesteps=60",
    },
    "tutorial.md": {
        "epochs=10": "epochs=1", "train_batches_per_epoch=50": "train_batches_per_epoch=2", "parallel_actors=16": "parallel_actors=2",
        "val_timesteps_per_epoch=100": "val_timesteps_per_epoch=30",
    },
    "scaling.md": {"epochs=40": "epochs=2", "train_batches_per_epoch=50": "train_batches_per_epoch=2"},
    "coming_from.md": {
        "epochs=80": "epochs=1", "train_batches_per_epoch=125": "train_batches_per_epoch=2",
        "val_timesteps_per_epoch=501,\n    seed": "val_timesteps_per_epoch=300,\n    seed", "train_timesteps_per_epoch=500": "train_timesteps_per_epoch=60",
        "timesteps=1_001, episodes=20": "timesteps=200, episodes=2", "val_timesteps_per_epoch=501,\n)": "val_timesteps_per_epoch=300,\n)",
        "epochs=3": "epochs=1",
    },
}  # fmt: skip
TINY = {
    "Experiment.train_timesteps_per_epoch": 60,
    "Experiment.train_batches_per_epoch": 2,
    "Experiment.batch_size": 4,
    **tiny.NETWORKS,
}
_FEW = "--env_workers 1 --epochs 1 --grads_per_epoch 2 --timesteps_per_epoch 24 --parallel_actors 2 --batch_size 4 --max_seq_len 8 --memory_size 16 --memory_layers 1"
ARGUMENTS = {
    **dict.fromkeys(("amago doctor", "amago buffer", "amago launch", "amago report"), ""),
    "amago train": f"{_FEW} --horizon 20",
    "amago rerun": "--env_workers 1",
    "amago tune": f"{_FEW} --horizon 20 --trials 1",
    **dict.fromkeys(("amago eval", "amago card"), "--episodes 2 --actors 2"),
    "amago demo": "--epochs 1 --minutes 0",
    "examples/00_meta_frozen_lake.py": f"{_FEW} --lake_size 2 --k_episodes 2",
    "examples/01_basic_gym.py": f"{_FEW} --horizon 20",
    "examples/04_tmaze.py": f"{_FEW} --horizon 8",
    "examples/05_dark_key_door.py": f"{_FEW} --room_size 3 --episode_length 5 --meta_horizon 10",
    "examples/06_alchemy.py": f"{_FEW} --num_trials 2 --steps_per_trial 5",
    "examples/13_mazerunner_relabeling.py": f"{_FEW} --maze_size 5 --time_limit 10",
    "examples/20_offline_lake.py": f"{_FEW} --rollouts 24",
    "examples/18_point_robot.py": f"{_FEW} --k_episodes 2 --episode_length 6",
    "examples/21_in_context_from_records.py": f"{_FEW} --tasks 3 --histories 4 --attempts 1",
    "examples/19_returns_of_any_size.py": _FEW,
}


@dataclass
class Block:
    """A fenced block: its language, its text, the line where the text begins, and why it is left out, if it is."""

    page: Path
    language: str
    text: str
    line: int
    left_out: str | None

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block is, from a first line ``# name.py``."""
        found = re.match(r"# ([\w./-]+\.(?:py|gin|yaml))\n", self.text)
        return found.group(1) if found else None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reduced(self) -> str:
        """The text with the replacements of `REDUCED`."""
        text = self.text
        for large, small in replacements(self.page).items():
            text = text.replace(large, small)
        return text


@cache
def replacements(page: Path) -> dict[str, str]:
    """The replacements of a page. Each must occur in its programs exactly once: otherwise the page was changed, and they no longer
    reduce what they are meant to."""
    text = "".join(b.text for b in BLOCKS if b.page == page and b.language == "python")
    for literal in REDUCED.get(page.name, {}):
        found = len(re.findall(rf"(?<![\w]){re.escape(literal)}(?![\d_])", text))
        assert found == 1, f"{page.name} has {literal!r} {found} times instead of once: change REDUCED in {Path(__file__).name}"
    return REDUCED.get(page.name, {})


@dataclass
class Section:
    page: Path
    title: str
    blocks: list[Block] = field(default_factory=list)
    files_before: list[Block] = field(default_factory=list)


def sections_of(page: Path) -> list[Section]:
    lines = page.read_text(encoding="utf-8").splitlines()
    sections, files, i = [Section(page, "the beginning")], [], 0
    while i < len(lines):
        if lines[i].startswith("## "):
            sections.append(Section(page, lines[i][3:].strip(), files_before=list(files)))
        elif lines[i].startswith("```"):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith("```"))
            above = re.fullmatch(r"<!-- no test: (.+) -->", lines[i - 1])
            text = "\n".join(lines[i + 1 : end]) + "\n"
            block = Block(page, lines[i][3:].strip(), text, i + 2, above.group(1) if above else None)
            sections[-1].blocks.append(block)
            if block.file_name:
                files.append(block)
            i = end
        i += 1
    return sections


SECTIONS = [s for page in PAGES for s in sections_of(page)]
BLOCKS = [block for section in SECTIONS for block in section.blocks]
ELSEWHERE = {"extending.md"}  # its programs are trained with in test_extending.py
WITH_PROGRAMS = [
    s for s in SECTIONS if s.page.name not in ELSEWHERE and any(b.language in ("python", "bash") for b in s.blocks)
]


def test_languages_are_known_and_what_is_reduced_is_still_there() -> None:
    """Tests would not run a block in another language; every page of `REDUCED` has what is replaced."""
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    assert len(WITH_PROGRAMS) > 25
    pages = [page for page in PAGES if page.name in REDUCED]
    assert sorted(page.name for page in pages) == sorted(REDUCED)
    assert all(replacements(page) for page in pages)


# the reduced evaluations are shorter than some rollouts
@pytest.mark.filterwarnings("ignore:the first rollout of:UserWarning")
@pytest.mark.parametrize("section", WITH_PROGRAMS, ids=lambda s: f"{s.page.name}: {s.title}")
def test_programs_run(section: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [b for b in section.blocks if b.language in ("python", "bash")]
    if all(b.left_out for b in wanted):
        pytest.skip(str(wanted[0].left_out))
    for block in [*section.files_before, *section.blocks]:
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.reduced, encoding="utf-8")
    main = types.ModuleType("__main__")
    try:
        with program(tmp_path, ["program.py"], TINY):
            monkeypatch.setitem(sys.modules, "__main__", main)
            for block in wanted:
                if block.left_out or block.file_name:
                    continue
                if block.language == "python":
                    _run_python(block, main)
                else:
                    _run_bash(block, tmp_path)
    finally:
        for value in vars(main).values():  # what the end of a program does
            if isinstance(value, Experiment):
                value.close()


def _run_python(block: Block, main: types.ModuleType) -> None:
    tree = ast.parse("\n" * (block.line - 1) + block.reduced, filename=block.place)
    before = len(sys.stdout.getvalue())  # type: ignore[attr-defined]
    exec(compile(tree, block.place, "exec"), vars(main))
    printed = sys.stdout.getvalue()[before:]  # type: ignore[attr-defined]
    for expected in re.findall(r"^print\(.*\)  # (.+)$", block.text, flags=re.MULTILINE):
        assert expected in printed, f"{block.place} promises {expected!r}, but printed {printed!r}"


def _commands(block: Block) -> list[tuple[dict[str, str], list[str]]]:
    """(variables, words) of each command, without comments and ``&``."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[-1] == "&":
            words.pop()
        variables = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words:
            found.append((variables, words))
    return found


def _run_bash(block: Block, cwd: Path) -> None:
    for variables, words in _commands(block):
        outcome = _run_command(words, variables, cwd)
        assert outcome.code == 0, f"{block.place}: {shlex.join(words)} ended with {outcome.code}:\n{outcome.text}"


def _run_command(words: list[str], variables: dict[str, str], cwd: Path) -> Outcome:
    if words[0] == "make":
        missing = [w for w in words[1:] if w not in _make_targets()]
        return Outcome(2 if missing else 0, f"the Makefile has no {missing}")
    if words[0] == "amago" and " ".join(words[:2]) in ARGUMENTS:
        extra = ARGUMENTS[" ".join(words[:2])].split() + ["--seeds", "1", "--processes", "1"] * ("--seeds" in words)
        return run_amago([*words[1:], *extra], cwd, variables)
    if words[0] == "python" and words[1] in ARGUMENTS:
        return run_script(ROOT / words[1], [*words[2:], *ARGUMENTS[words[1]].split()], cwd, env=variables)
    if words[0] == "python" and (cwd / words[1]).is_file():
        return run_script(cwd / words[1], words[2:], cwd, TINY, variables)
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300)
        return Outcome(done.returncode, done.stdout + done.stderr)
    return Outcome(127, "no test knows how to run this command")


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def _links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


@cache
def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in _links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            found = target.exists() and target.is_relative_to(ROOT) and (not anchor or anchor in _anchors(target))
            wrong += [] if found else [f"{page.relative_to(ROOT)}: {link}"]
    assert wrong == []


def test_the_reader_can_find_every_page() -> None:
    """Each page is linked from the README, or its folder is."""
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in _links(ROOT / "README.md")}
    for page in PAGES[1:]:
        assert page in linked or page.parent in linked, f"README.md leads nobody to {page.relative_to(ROOT)}"


def test_the_tutorial_gives_the_defaults_of_settings() -> None:
    """``| `field` | default |`` in the table of section 6."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    table = text.partition("## 6.")[2].partition("## 7.")[0]
    fields, checked = Experiment.__dataclass_fields__, 0
    for names, defaults in re.findall(r"^\| (`[^|]+`) \| ([^|]*)\|", table, flags=re.MULTILINE):
        given = [d.strip('`" ') for d in defaults.split(", ")] if defaults.strip() else []
        for name, default in zip(re.findall(r"`(\w+)`", names), given, strict=bool(given)):
            actual: Any = fields[name].default
            if actual is None or isinstance(actual, str):
                assert default == (actual or "none"), name
            else:
                assert float(default) == actual, name
            checked += 1
    assert checked > 10


def test_the_tutorial_names_every_sequence_model_and_agent() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    models = text.partition("## 4.")[2].partition("## 5.")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (`[^|]+`) \|", models, flags=re.MULTILINE))
    for name, cls in TRAJ_ENCODERS.items():
        if not cls.__module__.startswith("amago."):  # a program in the docs has registered it
            continue
        assert f"`{name}`" in rows.get(cls.__name__, ""), f"{cls.__name__}, called {name}, is missing from section 4"
    agents = text.partition("## 5.")[2].partition("## 6.")[0]
    assert all(f"`{cls.__name__}`" in agents for cls in AGENTS.values() if cls.__module__.startswith("amago."))
