"""The map of the library is that of its imports today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("make_architecture", ROOT / "docs" / "make_architecture.py")
assert SPEC is not None
assert SPEC.loader is not None
make = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make)
STALE = "changed imports or docstrings: run python docs/make_architecture.py"
EXAMPLE = {"top": {"left", "right", "base"}, "left": {"base"}, "right": {"base"}, "base": set()}


def test_the_picture_is_current() -> None:
    assert make.PICTURE.read_text(encoding="utf-8") == make.picture(make.graph()), STALE


def test_the_table_is_current() -> None:
    text = make.PAGE.read_text(encoding="utf-8")
    assert text == make.page(make.graph(), text), STALE


def test_every_room_says_what_it_is_for() -> None:
    lines = make.table(make.graph()).splitlines()[2:]
    assert len(lines) > 10
    assert all(len(line.split(" | ")[1]) > 20 for line in lines)


def test_imports_that_follow_from_others_are_left_out() -> None:
    assert make.reduced(EXAMPLE) == {"top": {"left", "right"}, "left": {"base"}, "right": {"base"}, "base": set()}
    assert make.depths(EXAMPLE) == {"top": 0, "left": 1, "right": 1, "base": 2}


def test_the_picture_shows_rooms_and_arrows() -> None:
    svg = ElementTree.fromstring(make.picture(EXAMPLE))
    name = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in svg.iter(f"{name}text")] == ["base", "left", "right", "top"]
    assert len(list(svg.iter(f"{name}line"))) == 4


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("from amago import config, Agent", {"config", "Agent"}),
        ("import amago.nets.ff", {"nets"}),
        ("def f():\n    from amago.store.view import StoreView", {"store"}),
        ("if TYPE_CHECKING:\n    from amago.agent import Agent", set()),
        ("from amagonist import x\nimport numpy", set()),
    ],
)
def test_imports_are_read(source: str, rooms: set[str]) -> None:
    assert set(make._imports(make.ast.parse(source))) == rooms
