"""Run Python code in processes in which nothing of amago was imported before: ``python in_fresh_processes.py < processes.json``.

The input is {process: {name: code}}, where pieces of one process run in turn; the output is {name: traceback, or "" where it ran}. This process
imports what takes long, and forks.
"""

import json
import os
import sys
import traceback
import warnings

import accelerate  # noqa: F401
import gin
import gymnasium  # noqa: F401
import numpy  # noqa: F401
import torch


def run(code: str) -> str:
    try:
        gin.clear_config()
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        exec(compile(code, "<fact>", "exec"), {"__name__": "fact"})
    except BaseException:
        return traceback.format_exc()[-1500:]
    return ""


def forked(pieces: dict[str, str]) -> dict[str, str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            json.dump({name: run(code) for name, code in pieces.items()}, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        text = found.read()
    return json.loads(text) if os.waitpid(pid, 0)[1] == 0 else dict.fromkeys(pieces, f"the process died {text}")


if __name__ == "__main__":
    assert not any(name.partition(".")[0] == "amago" for name in sys.modules)
    torch.set_num_threads(1)
    print(json.dumps({name: text for pieces in json.load(sys.stdin).values() for name, text in forked(pieces).items()}))
