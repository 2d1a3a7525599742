"""What the processes of a launch have started ends with the launcher."""

import subprocess
import sys

import tiny
from fault_helpers import assert_gone, processes, wait_until

PROGRAM = """
import sys, time
from pathlib import Path
from amago.launch.processes import Role, start_reaper
from amago.run.launched.protocol import Assignment

start_reaper(Path(sys.argv[1]))
parts = [Assignment("collector", i, 2, sys.argv[1], home=sys.argv[1]) for i in (0, 1)]
roles = [Role(part, ["sh", "-c", "setsid sleep 1000 & wait"]) for part in parts]
for role in roles:
    role.start()
roles[0].kill()
print("ready", flush=True)
time.sleep(1000)
"""


def test_what_children_have_started_ends_with_a_killed_launcher(tmp_path):
    launcher = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=tiny.environment()
    )
    assert launcher.stdout.readline() == "ready\n"
    # a child, what it has started, and the process that sees to their end
    wait_until(lambda: len(processes(launcher.pid)) == 3)
    everyone = processes(launcher.pid)
    launcher.kill()
    launcher.communicate()
    assert_gone(everyone)
