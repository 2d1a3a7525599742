"""Who may import whom, and what an import costs in modules."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import amago

ROOT = Path(amago.__file__).parent
LAYERS = [
    {"ops", "config", "spaces"},
    {"data", "hindsight", "relabeling"},
    {"store", "nets"},
    {"loading", "envs", "agent"},
    {"run"},
    {"policy"},
    {"experiment"},
    {"cli_utils"},
    {"cli"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
# beyond the levels: what a room must never know of
FORBIDDEN = {
    "spaces": {"ops", "config"},
    "data": {"ops", "config"},
    "store": {"nets", "ops", "config"},
    "nets": {"store"},
    "envs": {"nets", "loading", "agent", "ops"},
    "agent": {"store", "loading", "envs"},
}


def modules_of(path: Path) -> set[str]:
    """Modules of amago that a file imports anywhere, functions included (but not under TYPE_CHECKING)."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "amago":
            named = [f"{node.module}.{a.name}" for a in node.names]
            found.update(name if is_module(name) else node.module for name in named)
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.split(".")[0] == "amago")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found - {"amago"}


def is_module(name: str) -> bool:
    path = ROOT.parent / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in LEVEL, f"say in this test on which level amago.{room} lies"
    for other in {name.split(".")[1] for name in modules_of(path)} - {room}:
        assert LEVEL[other] <= LEVEL[room], f"{path} (level of {room}) imports amago.{other}, which lies above it"
        assert other not in FORBIDDEN.get(room, set()), f"amago.{room} must not know amago.{other}"


def test_no_module_imports_itself_in_a_circle():
    graph = {name_of(path): modules_of(path) for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"modules import each other: {' -> '.join((*above[above.index(name) :], name))}"
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_rooms_at_the_top():
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert len(rooms) <= 12, rooms


def modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout.splitlines()[-1]))


def test_an_actor_never_imports_torch():
    code = (
        "import amago, amago.envs, amago.store, amago.data.trajectory, amago.envs.pool.worker, amago.envs.builtin.frozen_lake"
    )
    assert "torch" not in modules_after(code)


def test_optional_packages_are_imported_at_use():
    heavy = {"wandb", "tensorboard", "jax", "ray", "matplotlib", "pandas", "tensorflow"}
    code = "import amago; amago.Experiment, amago.Agent, amago.cli_utils, amago.load_policy"
    assert not modules_after(code) & heavy


def test_public_names():
    for name in amago.__all__:
        assert getattr(amago, name) is not None
    assert set(amago.__all__) <= set(dir(amago))
    with pytest.raises(AttributeError, match="no attribute 'Agentt'"):
        _ = amago.Agentt


def test_public_import_paths():
    from amago.agent import Agent, BaseAgent, Multigammas, binary_filter, exp_filter
    from amago.envs import AMAGO_ENV_LOG_PREFIX, AMAGOEnv, SequenceWrapper
    from amago.envs.exploration import BilevelEpsilonGreedy, EpsilonGreedy
    from amago.experiment import Experiment
    from amago.hindsight import FrozenTraj, Relabeler, Timestep, Trajectory
    from amago.loading import Batch, DiskTrajDataset, RLData, RLDataset

    names = [
        Agent, BaseAgent, Multigammas, binary_filter, exp_filter, AMAGO_ENV_LOG_PREFIX, AMAGOEnv, SequenceWrapper, EpsilonGreedy,
        BilevelEpsilonGreedy, Experiment, FrozenTraj, Relabeler, Timestep, Trajectory, Batch, DiskTrajDataset, RLData, RLDataset,
    ]  # fmt: skip
    assert amago.Experiment is Experiment
    assert amago.Agent is Agent
    assert issubclass(Agent, BaseAgent)
    assert all(n is not None for n in names)
