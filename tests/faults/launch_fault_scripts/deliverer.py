"""Delivers the files of some spools for as long as it lives. Arguments: the store's directory, and the directories of collectors."""

import sys
from pathlib import Path

from amago.distributed import Answer, Ingest, LocalLink
from amago.distributed.mirror import Mirror

store, *directories = map(Path, sys.argv[1:])
mirror = Mirror(
    LocalLink(Ingest(store), lambda beats: Answer()), directories, share_disk=directories[0].name != "sends-content"
)
print("ready", flush=True)
while True:
    mirror.pump({})
