"""The allocator of a run: freed memory is used again while it lasts."""

import json
import platform
import subprocess
import sys

import pytest

PAGES = """
import json, resource, torch
from amago.run.group import keep_freed_memory

def pages():
    "Pages that the system clears for 96 MB in six tensors; there are 24,576."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _ = [torch.ones(2**22) for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory(True)
during = [pages() for _ in range(4)][-1]
print(json.dumps([kept, during, keep_freed_memory(False)]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again_until_it_is_restored():
    out = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=True)
    kept, during, restored = json.loads(out.stdout)
    assert kept
    assert during < 2_000
    assert restored
