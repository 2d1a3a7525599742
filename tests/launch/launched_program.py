"""A program for the tests of the launcher: a tiny run. Arguments: its directory, and the settings to change, as JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import tiny

import amago
from amago import config
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive

ROOT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def ordered(what):
    """Whether a file of this name in the run's directory says so; one process obeys."""
    try:
        (ROOT / what).unlink()
    except FileNotFoundError:
        return False
    return True


def stay(what, there):
    """Wait as long as a file of the first name is in the run's directory; one of the second name says that this process waits."""
    while (ROOT / what).exists():
        (ROOT / there).touch()
        time.sleep(0.02)


def hang():
    time.sleep(1e6)


def hold():
    """Hang without letting any other thread of this process run."""
    sys.setswitchinterval(1e9)
    while True:
        pass


class Slow(TMazePassive):
    """Takes three milliseconds a step, so that the processor is left to whoever starts, and does what a file in the run's directory says: crash,
    hang, or hold the interpreter."""

    def step(self, action):
        time.sleep(0.003)
        if ordered("crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        if ordered("hang"):
            hang()
        if ordered("hold"):
            hold()
        return super().step(action)


class Evaluated(Slow):
    """Waits at the end of a rollout for as long as a file in the run's directory says so."""

    def step(self, action):
        result = super().step(action)
        if result[2] or result[3]:
            stay("hold-evaluation", "holds-evaluation")
        return result


class Obedient(amago.Experiment):
    """Does what a file in the run's directory says: hang in an update, take long for it, or stay before a phase or while it saves."""

    def collect_new_training_data(self):
        stay("hold-phase", "holds-phase")
        super().collect_new_training_data()

    def train_step(self, batch, log_step):
        time.sleep(0.02)  # as in `Slow`
        if (ROOT / "update-slowly").exists():
            time.sleep(1.0)
        if ordered("hang-learner"):
            hang()
        if ordered("hold-learner"):
            hold()
        return super().train_step(batch, log_step)

    def save_checkpoint(self):
        stay("hold-save", "holds-save")
        super().save_checkpoint()


class Begun(amago.Callback):
    """Leaves a file of its rank once the process handles signals."""

    def before_epoch(self, experiment):
        (ROOT / f"learns-{os.environ.get('RANK', '0')}").touch()


def slow():
    return AMAGOEnv(Slow(tiny.CORRIDOR), env_name="TMaze")


def evaluated():
    return AMAGOEnv(Evaluated(tiny.CORRIDOR), env_name="TMaze")


def made():
    """The experiment of this program, not started."""
    fields = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    callbacks = [Begun(), *([amago.KeepBest()] if fields.get("val_interval") else [])]
    defaults = {"always_save_latest": True, "experiment_type": Obedient, "callbacks": callbacks, "make_val_env": evaluated}
    config.bind({"EpsilonGreedy.randomize_eps": False})
    return tiny.experiment(ROOT, slow, **defaults | fields)


def run():
    experiment = made()
    experiment.start()
    experiment.learn()
    experiment.close()


if __name__ == "__main__":
    run()
