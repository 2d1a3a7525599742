"""Delivers the files of some spools for as long as it lives. Arguments: the store's directory, the node's, and those with collectors."""

import os
import sys
from pathlib import Path

from amago.launch.bundles import Ingest, Spool
from amago.launch.bus import Bus

store, home, *directories = map(Path, sys.argv[1:])
bus = Bus(str(home / "bus"))
ingest = Ingest(bus, store, store.parent / ".arriving")
spool = Spool(bus, [home, *directories], f"writer-{os.getpid()}-{os.urandom(4).hex()}")
print("ready", flush=True)
while True:
    spool.pump(flush=True)
    ingest.pull()
