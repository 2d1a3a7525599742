"""The map of the library is that of its imports today."""

from pathlib import Path

from run_inside import module_of

ROOT = Path(__file__).parents[2]
make = module_of(ROOT / "docs" / "make_architecture.py")


def test_picture_and_table_are_current() -> None:
    stale = "changed imports or docstrings: run python docs/make_architecture.py"
    text, rooms = make.PAGE.read_text(encoding="utf-8"), make.graph()
    assert make.PICTURE.read_text(encoding="utf-8") == make.picture(rooms), stale
    assert text == make.page(rooms, text), stale
    lines = make.table(rooms).splitlines()[2:]
    assert len(lines) > 10
    assert all(len(line.split(" | ")[1]) > 20 for line in lines), "every room says what it is for"
