"""Write the public names of the library, with the names of their arguments, to a JSON file: `python tests/frozen/public_names.py FILE`.

A name is public where a module lists it in ``__all__``, or a page, example or program of the docs imports it.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path

import amago

ROOT = Path(amago.__file__).parents[1]


def imported_in_docs():
    """(module, name) of each ``from amago... import name`` in the README, the pages and the examples."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if path.suffix == ".md" else [text]
        for program in programs:
            for node in ast.walk(ast.parse(program)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "amago":
                    yield from ((node.module, alias.name) for alias in node.names if alias.name != "*")


def listed():
    """(module, name) of each entry of an ``__all__`` of the library."""
    for info in pkgutil.walk_packages(amago.__path__, "amago."):
        if "__main__" in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # an adapter whose package is not installed
            continue
        yield from ((info.name, name) for name in getattr(module, "__all__", ()))
    yield from (("amago", name) for name in amago.__all__)


def parameters(value):
    """Names of the arguments of a class or function; of a class also of its public methods, by their names."""
    try:
        own = list(inspect.signature(value).parameters) if callable(value) else None
    except (TypeError, ValueError):
        own = None
    if not inspect.isclass(value):
        return {"": own}
    methods = {name: f for name, f in inspect.getmembers(value) if not name.startswith("_") and inspect.isfunction(f)}
    ours = {name: f for name, f in methods.items() if (getattr(f, "__module__", None) or "").startswith("amago")}
    return {"": own} | {name: list(inspect.signature(f).parameters) for name, f in sorted(ours.items())}


def main(path):
    """Write the snapshot to ``path``."""
    found = {}
    for module, name in sorted(set(listed()) | set(imported_in_docs())):
        try:
            value = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        found[f"{module}.{name}"] = parameters(value) if callable(value) else {}
    Path(path).write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    print(len(found))


if __name__ == "__main__":
    main(sys.argv[1])
