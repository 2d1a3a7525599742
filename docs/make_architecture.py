"""Draw the import graph of the library's rooms, and list them in docs/architecture.md: ``python docs/make_architecture.py``.

A room is a package or module directly below `amago`. The picture leaves out an import that follows from others (if `run` imports
`agent` and `agent` imports `nets`, then not that `run` imports `nets`); the table has them all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "amago"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
BEGIN, END = "<!-- rooms -->", "<!-- end of rooms -->"
HOME = {"hindsight": "data", "relabeling": "data"}  # modules that only give names of another room
ANY_LEVEL = {"compat"}  # each of its modules lies on the level of what it imports, so that the room as a whole has none
WIDTH, HEIGHT, GAP, RISE, MARGIN = 124, 38, 26, 50, 20
STYLE = """\
  <style>
    rect { fill: #eef3fa; fill-opacity: 0.85; stroke: #1f5fa8; }
    line { stroke: #7a8794; stroke-width: 1.2; marker-end: url(#head); }
    #head path { fill: #7a8794; }
    text { font: 15px sans-serif; text-anchor: middle; fill: #17324d; }
  </style>
  <defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"><path d="M0,1 L7,4 L0,7 Z"/></marker></defs>
"""
Graph = dict[str, set[str]]


def graph() -> Graph:
    """The rooms that each room imports, functions' imports included and those for type checkers left out."""
    found: Graph = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "__init__.py":
            room = _room(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
            imported = {_room(name) for name in _imports(ast.parse(path.read_text(encoding="utf-8")))}
            found.setdefault(room, set()).update(imported - {room} - ANY_LEVEL)
    return found


def _room(name: str) -> str:
    return HOME.get(name, name)


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module == "amago":
        yield from (a.name for a in node.names if not a.name.startswith("_"))
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("amago."):
        yield node.module.split(".")[1]
    elif isinstance(node, ast.Import):
        yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("amago."))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def depths(rooms: Graph) -> dict[str, int]:
    """How many imports lie between each room and the rooms that none imports, at most."""
    depth: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in depth:
            depth[room] = 1 + max((of(other) for other, imported in rooms.items() if room in imported), default=-1)
        return depth[room]

    for room in rooms:
        of(room)
    return depth


def reduced(rooms: Graph) -> Graph:
    """The graph without the imports that follow from others."""

    def below(room: str) -> set[str]:
        return rooms[room].union(*(below(other) for other in rooms[room]))

    return {room: others - set().union(*(below(o) for o in others)) for room, others in rooms.items()}


def picture(rooms: Graph) -> str:
    """The graph as SVG: importers above what they import."""
    arrows, rows = reduced(rooms), _rows(rooms)
    width = max(len(row) for row in rows) * (WIDTH + GAP) - GAP + 2 * MARGIN
    height = len(rows) * (HEIGHT + RISE) - RISE + 2 * MARGIN
    place = {}
    for i, row in enumerate(rows):
        left = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        place.update({room: (left + j * (WIDTH + GAP), MARGIN + i * (HEIGHT + RISE)) for j, room in enumerate(row)})
    lines = [_arrow(place[a], place[b]) for a, others in sorted(arrows.items()) for b in sorted(others)]
    boxes = [_box(room, *place[room]) for room in sorted(rooms)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
    title = "  <title>Imports between the rooms of amago; an arrow points from the importer to the imported</title>\n"
    return head + title + STYLE + "".join(lines + boxes) + "</svg>\n"


def _rows(rooms: Graph) -> list[list[str]]:
    """Rooms by depth; in a row, each as near below its importers as the others allow."""
    arrows, depth = reduced(rooms), depths(rooms)
    rows: list[list[str]] = []
    place: dict[str, float] = {}
    for i in range(max(depth.values()) + 1):
        members = [room for room in sorted(rooms) if depth[room] == i]
        above = {room: [place[other] for other in place if room in arrows[other]] for room in members}
        members.sort(key=lambda room: sum(above[room]) / max(1, len(above[room])))
        place.update({room: j - (len(members) - 1) / 2 for j, room in enumerate(members)})
        rows.append(members)
    return rows


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH / 2, start[1] + HEIGHT, end[0] + WIDTH / 2, end[1]
    return f'  <line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>\n'


def _box(room: str, x: float, y: float) -> str:
    return (
        f'  <rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>\n'
        f'  <text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 5:g}">{room}</text>\n'
    )


def table(rooms: Graph) -> str:
    """A line for each room, the highest first: the first sentence of its docstring, and what it imports."""
    depth = depths(rooms)
    lines = ["| room | what it is for | imports |", "| --- | --- | --- |"]
    for room in sorted(rooms, key=lambda r: (depth[r], r)):
        path = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
        summary = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
        names = ", ".join(sorted(rooms[room])) or "nothing"
        lines.append(f"| `{room}` | {summary.replace('|', chr(92) + '|')} | {names} |")
    return "\n".join(lines)


def page(rooms: Graph, text: str) -> str:
    """The page's text with the table of today."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(rooms)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    rooms = graph()
    PICTURE.write_text(picture(rooms), encoding="utf-8")
    PAGE.write_text(page(rooms, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
