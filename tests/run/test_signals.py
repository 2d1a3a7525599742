"""Signals finish the step, save, and end the run with a documented code; another process continues it."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import tiny
from messages import names
from tiny import EPISODE, rows

import amago
from amago.run.group import Signals


def stop_at(method, when):
    """An experiment that receives SIGTERM as it calls a method in an epoch."""

    def hit(self):
        if self.epoch == when:
            os.kill(os.getpid(), signal.SIGTERM)
        getattr(amago.Experiment, method)(self)

    return type("Stops", (amago.Experiment,), {method: hit})


SHORT = {
    "epochs": 3, "train_timesteps_per_epoch": 2 * EPISODE, "train_batches_per_epoch": 3, "ckpt_interval": 1, "val_interval": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "epoch"), [("evaluate_val", 0), ("collect_new_training_data", 1), ("train_epoch", 1), ("save_checkpoint", 3)]
)
def test_wherever_it_is_hit(tmp_path, capsys, method, epoch):
    with pytest.raises(SystemExit) as stop:
        tiny.learned(tmp_path, experiment_type=stop_at(method, epoch), verbose=True, **SHORT)
    assert stop.value.code == 143
    assert names(capsys.readouterr().out, f"epoch {epoch}", "resume='auto'", 143)
    e = tiny.learned(tmp_path, resume="auto", **SHORT)
    assert (e.epoch, e.env_steps, e.learner.grad_steps) == (3, 3 * 4 * EPISODE, 9)
    evaluated = [r["epoch"] for r in rows(e.run_dir, "val")]
    assert sorted(set(evaluated)) == [0, 1, 2], "an evaluation that was interrupted is made up for"
    assert all(r["values"]["Number of Rollouts"] == 2 for r in rows(e.run_dir, "val")), "and half of one is not logged"


def test_without_checkpoints_the_code_is_the_same_and_the_policy_is_published(tmp_path):
    with pytest.raises(SystemExit) as stop:
        tiny.learned(
            tmp_path, experiment_type=stop_at("train_epoch", 1), **(SHORT | {"ckpt_interval": None, "always_save_latest": True})
        )
    assert stop.value.code == 143
    assert not list((tmp_path / "run" / "ckpts" / "training_states").iterdir())
    assert amago.load_policy(tmp_path / "run").act([0.0, 1.0]) in range(4)


def test_an_experiment_handles_signals_while_it_learns_only(tmp_path):
    handlers = lambda: [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]  # noqa: E731
    before, during = handlers(), []

    watch = type("Watch", (amago.Callback,), {"on_train_epoch_end": lambda *_: during.append(handlers())})()
    e = tiny.started(tmp_path, callbacks=[watch])
    assert handlers() == before
    e.learn()
    assert handlers() == before
    assert not set(during[0]) & set(before)


def test_whoever_catches_the_end_hears_signals_again():
    caught, signals = [], (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    hear = lambda signum, frame: caught.append(signum)  # noqa: E731
    before = {s: signal.signal(s, hear) for s in signals}
    try:
        try:
            with Signals() as stop:
                os.kill(os.getpid(), signal.SIGTERM)
                stop.check()
        except SystemExit as end:
            for s in signals:
                os.kill(os.getpid(), s)
            code = end.code
        assert code == 143
        assert caught == []
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT]
        assert [signal.getsignal(s) for s in signals] == [hear] * 3
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


LEAVE = """
import atexit, os, signal
import amago
from amago.run.group import Signals

def again(*_):
    print("still here", flush=True)
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), s)

class Last:
    def __del__(self, again=again, os=os):
        again()

last = Last()
atexit.register(again)
try:
    with Signals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop
        again()
        stop.check()
finally:
    again()
"""


def test_signals_change_nothing_until_the_process_has_ended():
    done = subprocess.run([sys.executable, "-c", LEAVE], env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 138, done
    assert done.stdout == "still here\n" * 4
    assert done.stderr == ""


def test_outside_the_main_thread_signals_are_left_alone(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(tiny.learned(tmp_path)))
    thread.start()
    thread.join()
    assert done[0].learner.grad_steps == 2
