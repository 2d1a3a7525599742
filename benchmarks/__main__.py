"""Runs a benchmark, or all of them: ``python -m benchmarks NAME [options]``."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser

NAMES = ("startup", "policy_step", "rollout", "learner", "learner_memory", "replay", "context")
ONLY_BY_NAME = ("scaling", "solve", "compiled", "fast_paths", "cluster", "cluster_check", "replay_size", "gpu")
"""Benchmarks that take several minutes each and are not part of ``all``."""


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("name", choices=(*NAMES, *ONLY_BY_NAME, "all"), help="what to measure")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, unless a benchmark sets its own number")
    parser.add_argument(
        "--rounds", type=int, default=None, help="measurements of each contender; the default depends on the case"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, to check that the benchmark runs; figures mean nothing"
    )
    parser.add_argument("--out", default=None, metavar="DIR", help="directory of NAME.json; default: benchmarks/results")
    parser.add_argument(
        "--constants", action="store_true", help="cluster: measure the constants of its cost model (docs/scaling.md) instead"
    )
    parser.add_argument(
        "--transitions", type=float, default=None, help="replay_size: transitions of the largest store; default: 100 million"
    )
    parser.add_argument("--peer", default=None, metavar="PATH", help="folder of another implementation of the same interface")
    parser.add_argument(
        "--peer-python", default=sys.executable, metavar="PYTHON", help="Python interpreter of that implementation"
    )
    options = parser.parse_args(argv)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.peer is not None and not os.path.isdir(options.peer):
        parser.error(f"--peer must be a folder, got {options.peer}")

    if options.constants:
        if options.name != "cluster":
            parser.error(f"--constants is an option of cluster, not of {options.name}")
        options.name = "cluster_constants"

    import torch

    from benchmarks.harness import report

    for name in NAMES if options.name == "all" else (options.name,):
        torch.set_num_threads(options.threads)
        report(name, importlib.import_module(f"benchmarks.{name}").rows(options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
