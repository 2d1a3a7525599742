"""How long `amago watch` takes to show many long runs.

"first sight" is the time from the start of a `Watcher` until it has served the table of runs, the learning curves and adaptation, with
plotly.js, over HTTP: what a browser waits for. The ceiling is one pass over the bytes of all logs, without reading a number in
them. "command" adds the start of the interpreter and the library's imports, up to the line that says that all runs are known.
Files are in the page cache. The target is 2 s of first sight.

The runs are 20 settings on five seeds. An epoch has an evaluation, a collection phase and 17 rows of training with ten metrics.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.harness import Row, compare

RETURN = "Average Total Return (Across All Env Names)"
TRAINED = (
    "Critic Loss", "Actor Loss", "Gradient Norm", "Actor Grad Norm", "Policy Entropy", "Learning Rate", "Skipped Updates",
    "Q(s, a) (gamma=0.99)", "TD Target (gamma=0.99)", "Mean |TD Error| (main gamma)",
)  # fmt: skip
SECONDS = 2.0


def log_of(rows: int) -> bytes:
    """A log of so many rows."""
    lines: list[str] = []
    for epoch in range(rows // 20 + 1):
        at = {"epoch": epoch, "env_steps": 1000 * epoch, "grad_steps": 170 * epoch, "wall_time": 60.0 * epoch}
        scores = {f"Average Attempt {k} Success in lake": 1 - 1 / (1 + epoch * (k + 1) / 500) for k in range(6)}
        returns = {RETURN: sum(scores.values()), "Number of Rollouts": 100.0, **scores}
        for section, seconds, values in (
            ("val", 5.0, returns),
            ("rollout", 20.0, returns),
            ("buffer", 20.0, {"timesteps": 1e6}),
        ):
            lines.append(json.dumps({**at, "wall_time": at["wall_time"] + seconds, "section": section, "values": values}))
        for i in range(17):
            values = {name: 1.0 / (1 + epoch + j) for j, name in enumerate(TRAINED)}
            row = {**at, "grad_steps": at["grad_steps"] + 10 * i, "wall_time": at["wall_time"] + 20 + 2 * i}
            lines.append(json.dumps({**row, "section": "train", "values": values}))
    return "\n".join([*lines[:rows], ""]).encode()


def write_runs(root: Path, runs: int, rows: int) -> int:
    """Write runs, five seeds of each settings; return the bytes of their logs."""
    log = log_of(rows)
    for i in range(runs):
        path = root / f"lr{i // 5}_seed{i % 5}"
        path.mkdir()
        (path / "metrics.jsonl").write_bytes(log)
        fields = {"run_name": path.name, "seed": i % 5, "learning_rate": 1e-4 * (i // 5 + 1), "epochs": rows // 20 * 2}
        (path / "settings.json").write_text(json.dumps({"fields": fields, "parameters": {}, "starts": []}))
    return runs * len(log)


def first_sight(root: Path, processor: list[float]) -> Callable[[], float]:
    """A contender that measures the seconds until a browser has what it shows first, and adds its processor time to a list."""
    from amago.run.report.server import WatchServer
    from amago.run.report.watch import Watcher

    def measure() -> float:
        began, spent = time.perf_counter(), time.process_time()
        watcher = Watcher([root])
        server = WatchServer(("127.0.0.1", 0), watcher)
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        watcher.start()
        try:
            for path in ("", "plotly.js", "state", "section/runs", "section/learning", "section/adaptation"):
                with urllib.request.urlopen(server.url + path) as answer:
                    answer.read()
            processor.append(time.process_time() - spent)
            return time.perf_counter() - began
        finally:
            server.shutdown()
            serving.join()
            server.server_close()
            watcher.stop()

    return measure


def command(root: Path) -> Callable[[], float]:
    """A contender that measures the seconds from the start of ``amago watch`` until it says that it knows all runs."""

    def measure() -> float:
        began = time.perf_counter()
        words = [sys.executable, "-m", "amago.cli", "watch", str(root), "--port", "0"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            process.stdout.readline()
            process.stdout.readline()
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    return measure


def one_pass(root: Path) -> float:
    """Seconds to read all logs once, as bytes."""
    began = time.perf_counter()
    for path in sorted(root.glob("*/metrics.jsonl")):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    return time.perf_counter() - began


def rows(options: Namespace) -> Iterator[Row]:
    """First sight of many runs, and the command."""
    runs, lines = (5, 2_000) if options.smoke else (100, 100_000)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        root = Path(directory)
        size = write_runs(root, runs, lines)
        processor: list[float] = []
        for what, ours in (("first sight", first_sight(root, processor)), ("command", command(root))):
            case = f"{what} of {runs} runs of {lines:,} rows"
            if options.only in case:
                row = compare(case, "s", {"ours": ours, "ceiling": lambda: one_pass(root)}, options.rounds or 3)
                target = row.ceiling / SECONDS if what == "first sight" else None
                details = {**row.details, "GB of logs": size / 1e9, "processor s of first sight": median(processor or [0.0])}
                yield replace(row, target=target, details=details)
