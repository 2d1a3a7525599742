"""The map of the library is that of its imports today."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("make_architecture", ROOT / "docs" / "make_architecture.py")
assert SPEC is not None
assert SPEC.loader is not None
make = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make)


def test_picture_and_table_are_current() -> None:
    stale = "changed imports or docstrings: run python docs/make_architecture.py"
    text, rooms = make.PAGE.read_text(encoding="utf-8"), make.graph()
    assert make.PICTURE.read_text(encoding="utf-8") == make.picture(rooms), stale
    assert text == make.page(rooms, text), stale
    lines = make.table(rooms).splitlines()[2:]
    assert len(lines) > 10
    assert all(len(line.split(" | ")[1]) > 20 for line in lines), "every room says what it is for"
