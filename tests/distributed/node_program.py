"""A collector without PyTorch: it waits for the node's greeting, then writes a file and a report again and again."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from amago.run.roles.protocol import HELLO, STATE_FILE, Assignment, collector_dir, outbox_of, read_soon, spool_of, write_soon

assignment = Assignment.of_this_process()
if "break" in sys.argv:
    raise SystemExit("no display is there")
beat = {"state": "starting", "steps": 0, "version": 0, "pid": os.getpid(), "count": 0}
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))  # a file and its report are both written, or neither
hello = None
while hello is None and not ended:
    hello = read_soon(Path(assignment.control) / HELLO)
    time.sleep(0.01)
if ended:
    raise SystemExit(128 + signal.SIGTERM)
run_dir = Path(hello["run_dir"])
directory = collector_dir(run_dir, assignment.index)
for folder in (spool_of(directory), outbox_of(directory)):
    folder.mkdir(parents=True, exist_ok=True)
while not ended:
    beat["count"] += 1
    paused = (read_soon(Path(assignment.control) / "orders.json") or {}).get("pause", False)
    beat.update(state="collecting", paused=paused, version=int((run_dir / "ckpts" / "latest" / "policy.pt").read_text()))
    if not paused:
        beat["steps"] += 1
        name = f"{os.getpid()}-{beat['steps']:012d}-n1.safetensors"
        tmp = spool_of(directory) / f".tmp-x-{name}"
        tmp.write_text(name)
        tmp.rename(spool_of(directory) / name)
        write_soon(outbox_of(directory) / f"{name}.json", {"steps": beat["steps"]})
        write_soon(directory / STATE_FILE, {"left": json.loads((directory / STATE_FILE).read_text())["left"] - 1
                                            if (directory / STATE_FILE).exists() else 1000})  # fmt: skip
    write_soon(assignment.beat_file, beat)
    time.sleep(0.01)
raise SystemExit(128 + signal.SIGTERM)
