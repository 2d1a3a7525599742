"""Run scripts and code blocks in this process as if they were programs of their own: importing torch again costs seconds."""

import contextlib
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amago import config
from amago.cli_utils.parts import REGISTRIES


@dataclass
class Outcome:
    """What a program left: its exit code, and what it printed (standard output and error together)."""

    code: int
    text: str


def module_of(path: Path) -> Any:
    """The module in a file that is not on the path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def program(
    cwd: Path, argv: Sequence[str], bindings: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> Iterator[io.StringIO]:
    """In the block: another directory, other arguments and variables, only ``bindings`` in gin, output caught.

    Modules that the program imports from ``cwd``, and names that it registers, are forgotten afterwards.
    """
    saved = (os.getcwd(), sys.argv, list(sys.path), dict(os.environ))
    registered = [(names, dict(names)) for names in REGISTRIES.values()]
    known, text = set(sys.modules), io.StringIO()
    os.chdir(cwd)
    sys.argv = list(argv)
    sys.path.insert(0, str(cwd))
    os.environ.update(env or {})
    try:
        with config.temporary(bindings or {}), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield text
    finally:
        os.chdir(saved[0])
        sys.argv, sys.path[:] = saved[1], saved[2]
        os.environ.clear()
        os.environ.update(saved[3])
        for names, before in registered:
            for name in set(names) - set(before):
                if not names[name].__module__.startswith("amago."):  # which is imported once
                    del names[name]
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(f"{cwd}{os.sep}"):
                del sys.modules[name]


def run_script(
    script: Path,
    arguments: Sequence[str] = (),
    cwd: Path | None = None,
    bindings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """``python script arguments``."""
    with program(cwd or Path.cwd(), [str(script), *arguments], bindings, env) as text:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            return Outcome(_exit_code(stop, text), text.getvalue())
    return Outcome(0, text.getvalue())


SIZES = (
    "--epochs 1 --grads_per_epoch 2 --timesteps_per_epoch 24 --parallel_actors 2 --batch_size 4 --memory_size 16 --memory_layers 1 "
    "--no_async --seed 0"
)
TINY = f"--run_name tiny --buffer_dir . {SIZES} --quiet"


def run_example(name: str, cwd: Path, arguments: str) -> str:
    """What a script of examples/ prints with tiny sizes and more arguments, which win; its run is ``tiny``. It must end well."""
    script = Path(__file__).parents[1] / "examples" / name
    outcome = run_script(script, [*TINY.split(), *arguments.split()], cwd)
    assert outcome.code == 0, outcome.text
    return outcome.text


def run_amago(arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> Outcome:
    """``amago arguments``."""
    from amago.cli import main

    with program(cwd, ["amago", *arguments], env=env) as text:
        try:
            code = main()
        except SystemExit as stop:
            code = _exit_code(stop, text)
    return Outcome(code, text.getvalue())


def refusal(capsys: Any, *arguments: str) -> str:
    """What ``amago arguments`` says as it ends with code 2, without a traceback."""
    from amago.cli import main

    capsys.readouterr()
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    return said


def _exit_code(stop: SystemExit, text: io.StringIO) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    text.write(f"{stop.code}\n")
    return 1
