"""Who may import whom, and what an import costs and changes."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import amago

ROOT = Path(amago.__file__).parent
LAYERS = [
    {"ops", "config", "spaces", "registry", "describe", "fields", "system"},
    {"data", "hindsight", "relabeling"},
    {"store", "nets"},
    {"loading", "envs", "agent"},
    {"run"},
    {"report"},
    {"policy"},
    {"experiment"},
    {"cli_utils"},
    {"cli"},
    {"quick"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
# Adapters serve rooms on every level, so each module of these lies on the level of the highest room that it imports.
ADAPTERS = {"compat", "utils", "launch", "distributed"}
# beyond the levels: what a room must never know of
FORBIDDEN = {
    "spaces": {"ops", "config"}, "data": {"ops", "config"}, "store": {"nets", "ops", "config"}, "nets": {"store"},
    "envs": {"nets", "loading", "agent", "ops"}, "agent": {"store", "loading", "envs"},
}  # fmt: skip

# what a run may set, and an import may not
PROCESS = """
import ctypes, faulthandler, gc, json, locale, logging, multiprocessing, os, random, signal, sys, threading, warnings
import numpy as np, torch
from torch.optim import optimizer

calls = []
sys.addaudithook(lambda event, args: calls.append(args[1]) if event == "ctypes.dlsym" else None)

def state():
    return {
        "signal handlers": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "malloc settings": [c for c in calls if c == "mallopt"],
        "random numbers": [repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist()],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),
                  torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), str(torch.get_default_device())],
        "floating point errors": repr(np.geterr()),
        "warnings": [repr(f) for f in warnings.filters if "amago" in repr(f)],
        "loggers": [repr(logging.root.handlers), logging.root.level],
        "excepthook": [repr(sys.excepthook), repr(threading.excepthook)],
        "directory": os.getcwd(),
        "environment": sorted(os.environ.items()),
        "locale": locale.setlocale(locale.LC_ALL),
        "threads": [t.name for t in threading.enumerate()],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "collector": [gc.isenabled(), gc.get_threshold()],
        "faulthandler": faulthandler.is_enabled(),
        "optimizer hooks": [len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)],
    }
"""


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


def level_of(module: str) -> int:
    room = module.split(".")[1]
    if room not in ADAPTERS:
        assert room in LEVEL, f"say in this test on which level amago.{room} lies"
        return LEVEL[room]
    path = ROOT.parent / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return max((level_of(name) for name in modules_of(path)), default=0)


def test_imports_point_down():
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in modules_of(path) if room != "__init__" else ():
            other = name.split(".")[1]
            if other != room:
                assert level_of(name) <= level_of(name_of(path)), (
                    f"{path} (level of {room}) imports {name}, which lies above it"
                )
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
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - ADAPTERS  # packages; amago/zoo has settings only
    assert len(rooms) <= 13, rooms


def modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout.splitlines()[-1]))


def test_rooms_of_actors_do_not_import_torch():
    rooms = ("envs", "envs.pool.worker", "envs.builtin", "nets", "store", "spaces", "data.trajectory")
    assert "torch" not in modules_after(f"import amago, {', '.join(f'amago.{room}' for room in rooms)}")


def test_importing_changes_nothing_in_the_process():
    code = f"""{PROCESS}
before = state()
import amago, amago.cli, amago.cli_utils, amago.experiment, amago.policy, amago.nets.mamba, amago.nets.attention
from amago import Experiment, Agent, load_policy
print(json.dumps([before, state()]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = json.loads(out.stdout)
    assert {k: v for k, v in after.items() if v != before[k]} == {}


def test_the_package_is_found_beside_a_folder_of_its_name(tmp_path):
    """A clone is a folder named amago; Python takes a folder without a package only where it finds none."""
    (tmp_path / "amago").mkdir()
    code = "from amago import __version__"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


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
