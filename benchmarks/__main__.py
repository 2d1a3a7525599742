"""``python -m benchmarks NAME [options]``, or ``all``."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser

NAMES = ("startup", "policy_step", "rollout", "learner", "learner_memory", "replay", "context")
ONLY_BY_NAME = ("scaling", "solve", "compiled", "fast_paths")
"""Take minutes each, and are not part of ``all``."""


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("name", choices=(*NAMES, *ONLY_BY_NAME, "all"), help="what to measure")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, where a benchmark does not say otherwise")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each contender; default: of the benchmark")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, not how fast")
    parser.add_argument("--out", default=None, metavar="DIR", help="where NAME.json goes; default: benchmarks/results")
    parser.add_argument("--peer", default=None, metavar="PATH", help="folder of another implementation with the same interface")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON", help="the interpreter that it runs in")
    options = parser.parse_args(argv)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.peer is not None and not os.path.isdir(options.peer):
        parser.error(f"--peer {options.peer} is no folder")

    import torch

    from benchmarks.harness import report

    for name in NAMES if options.name == "all" else (options.name,):
        torch.set_num_threads(options.threads)
        report(name, importlib.import_module(f"benchmarks.{name}").rows(options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
