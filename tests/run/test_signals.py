"""Signals finish the step, save, and end the run with a documented code; another process continues it."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny
from tiny import EPISODE, rows

from amago.run import checkpoint
from amago.run.signals import GracefulStop, Stopped

EPOCHS, STEPS, BATCHES = 3, 10 * EPISODE, 60
FIELDS = {
    "epochs": EPOCHS,
    "train_timesteps_per_epoch": STEPS,
    "train_batches_per_epoch": BATCHES,
    "ckpt_interval": 1,
    "log_interval": 10,
}
SCRIPT = """
import sys, time, tiny
import amago

class Slow(amago.Experiment):
    '''Slow enough to receive a signal in any phase.'''

    def train_step(self, batch, log_step):
        time.sleep(0.01)
        return super().train_step(batch, log_step)

    def save_checkpoint(self):
        print("saving", flush=True)
        time.sleep(0.5)
        super().save_checkpoint()

if __name__ == "__main__":
    e = tiny.started(sys.argv[1], experiment_type=Slow, env_mode=sys.argv[2], **FIELDS)
    print("ready", flush=True)
    e.learn()
    print("finished", flush=True)
""".replace("FIELDS", repr(FIELDS))


@pytest.fixture
def running(tmp_path):
    """Start the script above, and wait until it trains in its second epoch."""
    processes = []

    def start(env_mode="sync"):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), env_mode], env=tiny.environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        wait_for(process, lambda: any(r["epoch"] == 1 for r in train_rows(tmp_path / "run")))
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def train_rows(run_dir: Path):
    return rows(run_dir, "train") if (run_dir / "metrics.jsonl").is_file() else []


def wait_for(process, condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the run made no progress"
        time.sleep(0.02)


def state_of(root):
    found = checkpoint.newest_complete(root / "run" / "ckpts" / "training_states")
    return found, checkpoint.load_training_state(found)[2]


def finish(root):
    """Run the remaining epochs in this process."""
    e = tiny.learned(root, resume="auto", **FIELDS)
    assert (e.epoch, e.env_steps, e.updater.grad_steps) == (EPOCHS, EPOCHS * 2 * STEPS, EPOCHS * BATCHES)
    return e


@pytest.mark.parametrize(("signum", "code", "env_mode"), [(signal.SIGTERM, 143, "sync"), (signal.SIGINT, 130, "async")])
def test_a_signal_saves_and_ends_the_run(tmp_path, running, signum, code, env_mode):
    process = running(env_mode)
    began = time.monotonic()
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)  # as a terminal does, to the workers, too
    else:
        process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode == code, err
    assert "finished" not in out
    assert "Traceback" not in err
    found, state = state_of(tmp_path)
    assert found.name == "run_epoch_1"
    assert state["epoch"] == 1
    assert 0 < state["trained"] < BATCHES
    assert state["updater"]["grad_steps"] == BATCHES + state["trained"]
    e = finish(tmp_path)
    assert [r["grad_steps"] for r in rows(e.run_dir, "train")][-1] == EPOCHS * BATCHES


def test_a_second_signal_changes_nothing(tmp_path, running):
    process = running()
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "saving\n"]
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 138, err
    assert state_of(tmp_path)[1]["trained"] > 0
    finish(tmp_path)


def test_kill_loses_at_most_an_epoch(tmp_path, running):
    process = running()
    process.kill()
    process.communicate(timeout=20)
    found, state = state_of(tmp_path)
    assert (found.name, state["epoch"], state["updater"]["grad_steps"]) == ("run_epoch_0", 1, BATCHES)
    e = tiny.learned(tmp_path, resume="auto", **FIELDS)
    assert (e.epoch, e.env_steps, e.updater.grad_steps) == (EPOCHS, EPOCHS * 2 * STEPS, EPOCHS * BATCHES)


# ---- in this process -----------------------------------------------------------------------------------------------------


def stop_at(phase, when):
    """An experiment that receives SIGTERM in a phase of an epoch."""

    class Stops(tiny.amago.Experiment):
        def _hit(self, name):
            if name == phase and self.epoch == when:
                os.kill(os.getpid(), signal.SIGTERM)

        def evaluate_val(self):
            self._hit("evaluate")
            super().evaluate_val()

        def collect_new_training_data(self):
            self._hit("collect")
            super().collect_new_training_data()

        def train_epoch(self):
            self._hit("train")
            super().train_epoch()

        def save_checkpoint(self):
            self._hit("save")
            super().save_checkpoint()

    return Stops


SHORT = {
    "epochs": 3,
    "train_timesteps_per_epoch": 2 * EPISODE,
    "train_batches_per_epoch": 3,
    "ckpt_interval": 1,
    "val_interval": 1,
}


@pytest.mark.parametrize(
    ("phase", "epoch"), [*itertools.product(["evaluate", "collect", "train"], [0, 1]), ("save", 0), ("save", 2)]
)
def test_wherever_it_is_hit(tmp_path, phase, epoch):
    with pytest.raises(SystemExit) as stop:
        tiny.learned(tmp_path, experiment_type=stop_at(phase, epoch), **SHORT)
    assert stop.value.code == 143
    e = tiny.learned(tmp_path, resume="auto", **SHORT)
    assert (e.epoch, e.env_steps, e.updater.grad_steps) == (3, 3 * 4 * EPISODE, 9)
    evaluated = [r["epoch"] for r in rows(e.run_dir, "val")]
    assert sorted(set(evaluated)) == [0, 1, 2], "an evaluation that was interrupted is made up for"
    assert all(r["values"]["Number of Rollouts"] == 2 for r in rows(e.run_dir, "val")), "and half of one is not logged"


def test_without_checkpoints_the_code_is_the_same_and_the_policy_is_published(tmp_path):
    with pytest.raises(SystemExit) as stop:
        tiny.learned(
            tmp_path, experiment_type=stop_at("train", 1), **(SHORT | {"ckpt_interval": None, "always_save_latest": True})
        )
    assert stop.value.code == 143
    assert not list((tmp_path / "run" / "ckpts" / "training_states").iterdir())
    assert tiny.amago.load_policy(tmp_path / "run").act([0.0, 1.0]) in range(4)


def test_the_user_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tiny.learned(tmp_path, experiment_type=stop_at("train", 1), verbose=True, **SHORT)
    out = capsys.readouterr().out
    assert "epoch 1" in out
    assert "resume='auto'" in out
    assert "143" in out


def test_the_user_is_told_if_nothing_is_saved(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tiny.learned(tmp_path, experiment_type=stop_at("train", 1), verbose=True, **(SHORT | {"ckpt_interval": None}))
    assert "nothing was saved (exit code 143)" in capsys.readouterr().out


class LastMoment(GracefulStop):
    """A signal arrives after the last check, before the handlers are removed."""

    def __exit__(self, *args):
        if args[0] is None:
            os.kill(os.getpid(), signal.SIGTERM)
        super().__exit__(*args)


def test_a_signal_at_the_last_moment_counts(tmp_path):
    e = tiny.started(tmp_path, **SHORT)
    e._stop = LastMoment()
    with pytest.raises(SystemExit) as stop:
        e.learn()
    assert stop.value.code == 143
    assert state_of(tmp_path)[1]["epoch"] == 3


def test_a_stopped_experiment_is_closed(tmp_path):
    e = tiny.started(tmp_path, experiment_type=stop_at("collect", 0), **SHORT)
    with pytest.raises(SystemExit):
        e.learn()
    with pytest.raises(RuntimeError):
        e.learn()


def test_an_experiment_handles_signals_while_it_learns_only(tmp_path):
    handlers = lambda: [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]  # noqa: E731
    before, during = handlers(), []

    class Watch(tiny.amago.Experiment):
        def train_epoch(self):
            during.append(handlers())
            super().train_epoch()

    e = tiny.started(tmp_path, experiment_type=Watch)
    assert handlers() == before
    e.learn()
    assert handlers() == before
    assert not set(during[0]) & set(before)


def test_handlers_are_only_there_while_needed():
    before = signal.getsignal(signal.SIGTERM)
    with GracefulStop() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert (stop.requested, stop.exit_code) == (signal.SIGTERM, 143)
    assert signal.getsignal(signal.SIGTERM) == before
    with stop:
        assert not stop, "a new phase begins without the old request"


def test_whoever_catches_the_end_hears_signals_again():
    caught, signals = [], (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    hear = lambda signum, frame: caught.append(signum)  # noqa: E731
    before = {s: signal.signal(s, hear) for s in signals}
    try:
        try:
            with GracefulStop() as stop:
                os.kill(os.getpid(), signal.SIGTERM)
                raise Stopped(stop.exit_code)
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
from amago.run.signals import GracefulStop, Stopped

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
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop
        again()
        raise Stopped(stop.exit_code)
finally:
    again()
"""


def test_signals_change_nothing_until_the_process_has_ended():
    done = subprocess.run([sys.executable, "-c", LEAVE], env=tiny.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 138, done
    assert done.stdout == "still here\n" * 4
    assert done.stderr == ""


def test_waiting_ends_with_a_signal():
    began = time.monotonic()
    with GracefulStop() as stop:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        stop.wait(20.0)
        assert stop.exit_code == 138
    assert time.monotonic() - began < 15


def test_outside_the_main_thread_signals_are_left_alone(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(tiny.learned(tmp_path)))
    thread.start()
    thread.join()
    assert done[0].updater.grad_steps == 2
