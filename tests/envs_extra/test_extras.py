"""Environments whose package is missing say what to install."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from support.pokemon import PokemonBattle

from amago.envs.builtin import _common as _extras
from amago.envs.builtin.ale_retro import AtariGame, RetroArcade
from amago.envs.builtin.babyai import MultitaskMetaBabyAI
from amago.envs.builtin.crafter import CrafterInstructions
from amago.envs.builtin.gymnax_envs import GymnaxCompatibility
from amago.envs.builtin.popgym_envs import MultiDomainPOPGym, POPGymGame
from amago.envs.builtin.procgen_envs import TwoAttemptMTProcgen
from amago.envs.builtin.xland_minigrid import XLandMiniGrid

BUILTIN = Path(_extras.__file__).parent
PROJECT = (BUILTIN.parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def test_every_extra_that_a_message_names_is_one() -> None:
    named = set()
    for file in BUILTIN.glob("*.py"):
        named |= set(re.findall(r'require\("[\w.]+", "(\w+)"\)', file.read_text(encoding="utf-8")))
    assert named >= {"popgym", "gymnax", "xland"}
    for extra in named:
        assert re.search(rf"^{extra} = \[", PROJECT, flags=re.MULTILINE), extra


_PAGE = (
    AtariGame, CrafterInstructions, GymnaxCompatibility, MultiDomainPOPGym, MultitaskMetaBabyAI, PokemonBattle, POPGymGame, RetroArcade, TwoAttemptMTProcgen,
    XLandMiniGrid,
)  # fmt: skip
CLASSES = {cls.__name__: cls for cls in _PAGE}


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_gives_arguments_and_defaults(name: str) -> None:
    page = (BUILTIN.parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    calls = [
        node.value
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        for node in ast.parse(block).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == name
    ]
    (call,) = calls
    given = [(ast.unparse(a), inspect.Parameter.empty) for a in call.args]
    given += [(str(k.arg), ast.literal_eval(k.value)) for k in call.keywords]
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    assert given == [(p.name, p.default) for p in parameters]
