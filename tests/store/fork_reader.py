"""Reads a store in a forked child and in its parent, with the files that were open before the fork."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from store_helpers import assert_numbered, opened

store = opened(sys.argv[1])
assert_numbered(store.read(0))
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
print("parent" if pid else "child", [assert_numbered(store.read(i)) for i in range(len(store))], flush=True)
