"""The page on the built-in environments says what the code does: signatures, defaults, metrics."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from amago import config
from amago.envs import builtin
from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
NAMES = sorted(builtin.__all__)


def documented_calls() -> dict[str, dict[str, Any]]:
    """{class: {argument: default}} of the code blocks that hold nothing but signatures."""
    calls: dict[str, dict[str, Any]] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        for node in ast.parse(block).body:
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in NAMES:
                required = {arg.id: inspect.Parameter.empty for arg in call.args if isinstance(arg, ast.Name)}
                calls[call.func.id] = required | {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(builtin, name)).parameters
    assert list(documented_calls()[name].items()) == [(p.name, p.default) for p in parameters.values()]


@pytest.mark.parametrize("name", NAMES)
def test_every_logged_metric_is_in_the_tables(name: str) -> None:
    cls: type[gym.Env[Any, Any]] = getattr(builtin, name)
    env = cls(4) if name == "MetaFrozenLake" else cls()
    env.reset(seed=0)
    env.action_space.seed(0)
    logged: set[str] = set()
    for _ in range(3000):
        *_, done, _, info = env.step(env.action_space.sample())
        logged |= set(info)
        if done:
            env.reset()
    assert logged
    for key in logged:
        assert key.startswith(AMAGO_ENV_LOG_PREFIX + " ")
        metric = re.sub(r"\d+", "{i}", key.removeprefix(AMAGO_ENV_LOG_PREFIX + " "))
        assert f"| `{metric}`" in PAGE


def test_defaults_can_be_bound_with_gin() -> None:
    config.bind({"MetaFrozenLake.hard_mode": True, "amago.envs.builtin.TMazePassive.corridor_length": 3, "RoomKeyDoor.size": 4})
    try:
        assert builtin.MetaFrozenLake(4).hard_mode is True
        assert builtin.MetaFrozenLake(4, hard_mode=False).hard_mode is False
        assert builtin.TMazePassive().episode_length == 4
        assert (builtin.TMazeActive().corridor_length, builtin.RoomKeyDoor().size) == (10, 4)
    finally:
        config.clear()


def test_importing_them_loads_no_torch() -> None:
    code = "import sys, amago.envs.builtin; assert 'torch' not in sys.modules and 'pygame' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
