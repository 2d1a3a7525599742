"""Text files are opened as UTF-8, whatever the locale."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT_CALLS = {"read_text": 0, "write_text": 1}  # the place of ``encoding`` among the arguments
NOT_FILES = {"os", "zipfile", "tarfile", "webbrowser"}  # whose ``open`` opens no text file


def unnamed(tree):
    """(line, call) of each call that opens a text file, or text pipes, and does not name the encoding."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        f, given = call.func, {k.arg: k.value for k in call.keywords}
        name = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")
        module = f.value.id if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) else ""
        if "encoding" in given:
            continue
        if name in TEXT_CALLS:
            wrong = len(call.args) <= TEXT_CALLS[name]
        elif name in ("open", "fdopen") and not (name == "open" and module in NOT_FILES):
            place = 0 if isinstance(f, ast.Attribute) and module not in ("os", "io", "gzip") else 1
            mode = given.get("mode", call.args[place] if len(call.args) > place else None)
            wrong = mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))
        elif name in ("run", "Popen", "check_output", "check_call"):
            wrong = module == "subprocess" and bool({"text", "universal_newlines"} & given.keys())
        else:
            wrong = name in ("FileHandler", "RotatingFileHandler", "TextIOWrapper")
        if wrong:
            yield call.lineno, ast.unparse(call)


@pytest.mark.parametrize("folder", ["amago", "examples", "tools"])
def test_every_text_file_is_opened_with_its_encoding(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "node_modules" not in path.parts
        for line, call in unnamed(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)
