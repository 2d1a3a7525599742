"""A node that writes files, ten a second, and delivers them. Arguments: the bus, its directory, the number of files, the bytes of each."""

import os
import sys
import time
from pathlib import Path

from amago.launch.bundles import Spool
from amago.launch.bus import Bus, own_directory
from amago.launch.node import Every
from amago.run.launched.protocol import SPOOL

url, home, count, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
folder = own_directory(home) / "collector-0" / SPOOL
folder.mkdir(parents=True, exist_ok=True)
spool = Spool(Bus(url), [home], f"{home.name}-{os.getpid()}-{os.urandom(4).hex()}")
thread = Every(spool.pump, 0.25, "delivery")
made = home / "made"
while (n := len(made.read_text().split()) if made.exists() else 0) < count:
    name = f"{home.name}-{n:06d}-n1.safetensors"
    (folder / ".tmp").write_bytes(os.urandom(size))
    os.replace(folder / ".tmp", folder / name)
    with open(made, "a") as f:
        f.write(f"{name}\n")
    time.sleep(0.1)
while spool.waiting:
    time.sleep(0.1)
thread.end()
