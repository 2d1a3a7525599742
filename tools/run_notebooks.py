"""Execute the notebooks and store what they print and draw: ``python tools/run_notebooks.py [NAME...]``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def executed(path: Path, directory: str) -> Any:
    """A notebook after all its cells have run, in a directory of their own.

    Raises:
        nbclient.exceptions.CellExecutionError: one of them failed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": directory}})
    return client.execute(env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as directory:
            notebook = executed(path, directory)
        for cell in notebook.cells:
            cell.metadata = {}  # times, which change with every execution
            if "outputs" in cell:  # warnings hold paths of this machine
                cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
