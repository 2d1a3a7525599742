"""A program for the tests of the launcher: a tiny run. Arguments: its directory, and the settings to change, as JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import tiny

from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive


class Slow(TMazePassive):
    """Takes a millisecond a step, and does what a file of this name in the run's directory says: crash, hang, or hold the interpreter."""

    root = Path()

    def step(self, action):
        time.sleep(0.001)
        for what in ("crash", "hang", "hold"):
            order = self.root / what
            try:
                order.unlink()  # one process obeys
            except FileNotFoundError:
                continue
            if what == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hold":
                sys.setswitchinterval(1e9)
                while True:
                    pass
            time.sleep(1e6)
        return super().step(action)


def slow():
    return AMAGOEnv(Slow(tiny.CORRIDOR), env_name="TMaze")


if __name__ == "__main__":
    Slow.root = Path(sys.argv[1])
    fields = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    defaults = {"always_save_latest": True, "env_trial_steps": 0}
    experiment = tiny.experiment(sys.argv[1], slow, **defaults | fields)
    experiment.start()
    experiment.learn()
    print("learned", experiment.grad_update_counter, experiment.env_steps, flush=True)
    experiment.close()
