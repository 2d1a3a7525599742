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
    {"ops", "config", "action_spaces", "spaces", "hindsight", "relabeling", "shutdown", "plots", "console", "archives"}
    | {"pace"},
    {"store", "nets"},
    {"loading", "envs"},
    {"agent"},
    {"rollout", "checkpoint", "foreign", "logging", "training", "settings", "actors", "experiment_checks"}
    | {"step_model", "export"},
    {"evaluation", "policy", "resume"},
    {"experiment"},
    {"cli_utils"},
    {"cli"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
# beyond the levels: what a part must never know of
FORBIDDEN = {
    "nets": {"loading", "envs", "store", "agent"},
    "store": {"nets", "ops"},
    "envs": {"nets", "loading", "agent", "ops"},
    "hindsight": {"ops"},
    "spaces": {"ops", "config", "hindsight"},
    "action_spaces": {"ops", "config", "hindsight", "spaces"},
}


def imports_of(path: Path) -> set[str]:
    """Parts of amago that a file imports anywhere, functions included (but not under TYPE_CHECKING)."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "amago":
            parts = node.module.split(".")
            found.update([parts[1]] if len(parts) > 1 else [a.name for a in node.names if a.name in LEVEL])
        if isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("amago."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    assert part in LEVEL, f"say in this test on which level amago.{part} lies"
    for other in imports_of(path) - {part}:
        assert LEVEL[other] <= LEVEL[part], f"{path} (level of {part}) imports amago.{other}, which lies above it"
        assert other not in FORBIDDEN.get(part, set()), f"amago.{part} must not know amago.{other}"


def modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout.splitlines()[-1]))


def test_an_actor_never_imports_torch():
    code = "import amago, amago.envs, amago.store, amago.hindsight, amago.envs.worker, amago.envs.builtin.frozen_lake"
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
