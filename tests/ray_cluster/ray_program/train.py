"""A program for the tests of launches over several machines: a tiny run. Arguments: its directory, and the settings to change, as JSON."""

import json
import os
import sys

import slow_maze
import tiny

if __name__ == "__main__":
    print("modules from", os.path.dirname(slow_maze.__file__), "in", sorted(os.listdir()), flush=True)
    fields = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    if fields.pop("broken_on", None) == os.environ.get("AMAGO_TEST_NODE", ""):
        raise SystemExit("no display is there")
    defaults = {"always_save_latest": True, "env_trial_steps": 0}
    experiment = tiny.experiment(sys.argv[1], slow_maze.make, **defaults | fields)
    experiment.start()
    experiment.learn()
    print("learned", experiment.grad_update_counter, experiment.env_steps, flush=True)
    experiment.close()
