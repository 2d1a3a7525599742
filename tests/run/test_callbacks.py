"""Callbacks: when they are called, with what, and what becomes of their state and their exceptions."""

import signal
from collections import Counter

import numpy as np
import pytest
import tiny
import torch
from messages import check_refused, naming
from tiny import EPISODE, experiment, learned, rows, started

import amago
from amago.run import checkpoint
from amago.run.checkpoint import load_weight_file
from amago.run.group import Stopped
from amago.run.metric_names import AVERAGE_RETURN, ROLLOUT_LENGTH, STEPS_PER_SECOND, UPDATES_PER_SECOND
from amago.run.settings import SettingsError


class Diary(amago.Callback):
    """Writes down each moment, with its epoch, and what it was given."""

    def __init__(self):
        self.moments, self.metrics, self.rows, self.paths = [], {}, [], []

    def on_save_checkpoint(self, experiment, path):
        self.moments.append(("save", experiment.epoch))
        self.paths.append(path)

    def on_log(self, experiment, row):
        self.rows.append(row)

    def on_exception(self, experiment, exception):
        self.moments.append(("exception", type(exception).__name__))


def noting(moment):
    def note(self, experiment, metrics=None):
        self.moments.append((moment, experiment.epoch))
        self.metrics[moment] = metrics

    return note


NOTED = {"collect": "collect_epoch_end", "train": "train_epoch_end", "validation": "validation_end", "epoch": "epoch_end"}
for moment, method in (NOTED | {name: name for name in ("start", "end", "close")}).items():
    setattr(Diary, f"on_{method}", noting(moment))


def test_the_moments_of_a_run(tmp_path):
    diary = Diary()
    e = learned(tmp_path, callbacks=iter([diary]), epochs=2, val_interval=2, ckpt_interval=1)
    e.close()
    e.close()
    assert diary.moments == [
        ("start", 0), ("validation", 0), ("collect", 0), ("train", 0), ("epoch", 1), ("save", 1), ("collect", 1), ("train", 1),
        ("epoch", 2), ("save", 2), ("end", 2), ("close", 2),
    ]  # fmt: skip
    assert all((path / "manifest.json").is_file() for path in diary.paths)
    assert [r.section for r in diary.rows] == [r["section"] for r in rows(e.run_dir)]
    assert [dict(r.values) for r in diary.rows] == [r["values"] for r in rows(e.run_dir)]
    assert (diary.rows[-1].env_steps, diary.rows[-1].grad_steps) == (8 * EPISODE, 4)


def test_the_metrics_of_moments(tmp_path):
    diary = Diary()
    e = learned(tmp_path, callbacks=[diary], val_interval=1, train_batches_per_epoch=5, log_interval=2)
    metrics = diary.metrics
    assert metrics["collect"][ROLLOUT_LENGTH] == EPISODE
    assert metrics["collect"][STEPS_PER_SECOND] > 0
    assert 0 < metrics["collect"]["Epsilon"] <= 1
    assert AVERAGE_RETURN in metrics["validation"]
    assert metrics["validation"][ROLLOUT_LENGTH] == EPISODE
    logged = [r["values"] for r in rows(e.run_dir, "train")]
    assert len(logged) > 1
    batches = [3, 2]
    mean = np.average([r["Critic Loss"] for r in logged], weights=batches)
    assert metrics["train"]["Critic Loss"] == pytest.approx(mean)
    assert metrics["train"][UPDATES_PER_SECOND] > 0
    assert metrics["epoch"]["train/Critic Loss"] == metrics["train"]["Critic Loss"]
    assert metrics["epoch"][f"val/{AVERAGE_RETURN}"] == metrics["validation"][AVERAGE_RETURN]
    assert metrics["epoch"][f"rollout/{STEPS_PER_SECOND}"] == metrics["collect"][STEPS_PER_SECOND]
    assert metrics["epoch"]["rollout/Epsilon"] == metrics["collect"]["Epsilon"]


class Watch(amago.Callback):
    """Counts the moments within phases, and may end them after some steps."""

    def __init__(self, ends=()):
        self.counts, self.ends = Counter(), dict(ends)

    def before_epoch(self, experiment):
        self.counts["epoch"] += 1

    def before_update(self, experiment):
        self.counts["update"] += 1

    def on_step(self, experiment, steps, phase):
        self.counts[phase] += steps
        return self.counts[phase] >= self.ends.get(phase, float("inf"))


def test_moments_within_an_epoch(tmp_path):
    watch = Watch()
    e = learned(tmp_path, callbacks=[watch], epochs=2, val_interval=1, train_batches_per_epoch=3)
    e.evaluate_test(e.make_val_env, timesteps=EPISODE + 1)
    steps = {"collect": 2 * e.train_timesteps_per_epoch, "evaluate": 2 * e.val_timesteps_per_epoch, "test": EPISODE + 1}
    assert watch.counts == {"epoch": 2, "update": 6} | {phase: n * e.parallel_actors for phase, n in steps.items()}


def test_a_callback_may_end_a_phase(tmp_path):
    watch = Watch({"collect": 6, "evaluate": 2 * EPISODE})
    e = learned(tmp_path, callbacks=[watch], val_interval=1, val_timesteps_per_epoch=100, train_batches_per_epoch=0)
    assert (e.env_steps, watch.counts["evaluate"]) == (6, 2 * EPISODE)


def test_a_callback_may_end_the_run(tmp_path):
    diary = Diary()
    e = learned(tmp_path, callbacks=[tiny.StopAfter(2), diary], epochs=5, ckpt_interval=10)
    assert e.epoch == 2
    assert diary.moments[-2:] == [("save", 2), ("end", 2)], "and its last state is saved"
    e.should_stop = False
    e.learn()
    assert e.epoch == 5


@pytest.mark.parametrize("moment", ["on_start", "before_update", "on_step", "on_epoch_end", "on_save_checkpoint", "on_log"])
def test_exceptions_are_not_swallowed(tmp_path, moment):
    def fail(self, *args):
        raise ZeroDivisionError(moment)

    Fails = type("Fails", (amago.Callback,), {moment: fail})
    diary = Diary()
    e = experiment(tmp_path, callbacks=[diary, Fails()], val_interval=1, ckpt_interval=1)
    with pytest.raises(ZeroDivisionError, match=moment):
        e.start()
        e.learn()
    if moment != "on_start":
        assert diary.moments[-1] == ("exception", "ZeroDivisionError")
    e.close()
    assert diary.moments[-1][0] == "close"
    started(tmp_path, resume="auto").close()  # the run's directory is free again


def test_a_callback_that_fails_to_close_leaves_nothing_open(tmp_path):
    def fail(self, experiment):
        raise ZeroDivisionError

    diary = Diary()
    e = learned(tmp_path, callbacks=[type("Fails", (amago.Callback,), {"on_close": fail})(), diary], ckpt_interval=1)
    with pytest.raises(ZeroDivisionError):
        e.close()
    assert diary.moments[-1] == ("close", 1)
    learned(tmp_path, resume="auto", epochs=2).close()


def test_callbacks_see_a_signal(tmp_path):
    diary = Diary()
    kill = type("Kill", (amago.Callback,), {"on_collect_epoch_end": lambda *_: signal.raise_signal(signal.SIGTERM)})()
    with pytest.raises(Stopped):
        learned(tmp_path, callbacks=[kill, diary], ckpt_interval=1)
    assert diary.moments == [("start", 0), ("collect", 0), ("save", 0), ("exception", "Stopped"), ("close", 0)]


class Counts(amago.Callback):
    def __init__(self, start=0):
        self.epochs, self.sums = start, torch.zeros(2)

    def on_epoch_end(self, experiment, metrics):
        self.epochs += 1
        self.sums += 1.5

    def state_dict(self):
        return {"epochs": self.epochs, "sums": self.sums, "more": [None, "a", (1.5, True)]}

    def load_state_dict(self, state):
        assert state["more"] == [None, "a", (1.5, True)]
        self.epochs, self.sums = state["epochs"], state["sums"]

    def on_start(self, experiment):
        assert self.epochs == experiment.epoch or self.epochs >= 10, "the state is restored before"


def test_states_go_on_after_a_resume(tmp_path):
    learned(tmp_path, callbacks=[Counts(), Counts(10)], epochs=2, ckpt_interval=1).close()
    again = [Counts(), Counts()]
    learned(tmp_path, callbacks=again, epochs=3, ckpt_interval=1, resume="auto").close()
    assert [c.epochs for c in again] == [3, 13]
    assert again[0].sums.tolist() == [4.5, 4.5]


def test_a_state_without_its_callback_is_reported(tmp_path, capsys):
    learned(tmp_path, callbacks=[Counts()], ckpt_interval=1).close()
    learned(tmp_path, epochs=2, ckpt_interval=1, resume="auto", verbose=True).close()
    assert "the state of the callback Counts is not used" in capsys.readouterr().out


@pytest.mark.parametrize("value", [np.float64(1.0), np.zeros(2), object()])
def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path, value):
    Wrong = type("Wrong", (amago.Callback,), {"state_dict": lambda self: {"a": [value]}})
    with pytest.raises(TypeError, match=naming("Wrong", f"{{'a': [{value!r}]}}")):
        learned(tmp_path, callbacks=[Wrong()], ckpt_interval=1)


Misspelled = type("Misspelled", (amago.Callback,), {"on_train_epoch_ended": print})


@pytest.mark.parametrize(
    ("callbacks", "named"),
    [
        ([Diary], ("callbacks[0]", "Diary()")),
        ([Diary(), print], ("callbacks[1]", "amago.Callback")),
        ("abc", ("callbacks", "'abc'")),
        ([Misspelled()], ("on_train_epoch_ended", "on_train_epoch_end")),
    ],
)
def test_what_is_no_callback_is_refused(tmp_path, callbacks, named):
    with pytest.raises(SettingsError, match=naming(*named)):
        started(tmp_path, callbacks=callbacks)


def scripted(returns):
    """An experiment whose evaluations have given returns."""

    class Scripted(amago.Experiment):
        def policy_metrics(self, found, specials):
            return {**super().policy_metrics(found, specials), AVERAGE_RETURN: returns[min(self.epoch, len(returns) - 1)]}

    return Scripted


def stopped_at(tmp_path, returns, epochs=8, resume="never", **options):
    stopping = amago.EarlyStopping(**options)
    e = learned(
        tmp_path, experiment_type=scripted(returns), callbacks=[stopping], val_interval=1, epochs=epochs, ckpt_interval=1, resume=resume,
        train_timesteps_per_epoch=EPISODE,
    )  # fmt: skip
    e.close()
    return e.epoch, stopping


@pytest.mark.parametrize(
    ("returns", "options", "epoch"),
    [
        ([1, 2, 2, 2, 5], {"patience": 2}, 4),
        ([1, 3, 3.5, 3.9, 9], {"patience": 2, "min_delta": 1.0}, 4),
        ([5, 4, 4, 3, 3, 3], {"patience": 2, "mode": "min"}, 6),
        ([1, 2, 3, 4, 5], {"threshold": 3.0}, 3),
        ([float("nan"), float("nan"), 3], {"patience": 2}, 2),
    ],
)
def test_early_stopping(tmp_path, returns, options, epoch):
    assert stopped_at(tmp_path, returns, **options)[0] == epoch


def test_early_stopping_goes_on_waiting_after_a_resume(tmp_path):
    returns = [3, 2, 2, 2, 2, 2, 2, 2]
    epoch, stopping = stopped_at(tmp_path, returns, epochs=2, patience=3)
    assert (epoch, stopping.best, stopping.waited) == (2, 3, 1)
    assert stopped_at(tmp_path, returns, patience=3, resume="auto")[0] == 4
    assert stopped_at(tmp_path, returns, patience=3, resume="auto")[0] == 4, "it has ended"


def test_mistakes_in_callbacks_that_follow_a_metric(tmp_path):
    check_refused(
        ValueError,
        (naming("mode", "'best'"), lambda: amago.EarlyStopping(mode="best")),
        (naming("patience", 0), lambda: amago.EarlyStopping(patience=0)),
        (naming("min_delta", -1), lambda: amago.EarlyStopping(min_delta=-1)),
        (naming("EarlyStopping", "val_interval"), lambda: started(tmp_path, callbacks=[amago.EarlyStopping()])),
        (naming("KeepBest", "val_interval"), lambda: started(tmp_path, name="b", callbacks=[amago.KeepBest()])),
        (
            naming("Number of Rollout", "'Number of Rollouts'"),
            lambda: learned(tmp_path, name="c", callbacks=[amago.KeepBest("Number of Rollout")], val_interval=1),
        ),
    )


class Evaluated(amago.Callback):
    """Remembers the weights that were evaluated, in order."""

    def __init__(self):
        self.weights = []

    def on_validation_end(self, experiment, metrics):
        with experiment.acting_weights():
            self.weights.append(tiny.weights(experiment))


@pytest.mark.parametrize(("threshold", "epoch"), [(3.0, 3), (1.0, 1)])
def test_the_weights_of_the_evaluation_that_ends_a_run_are_its_last(tmp_path, threshold, epoch):
    """The epoch neither collects nor trains; a run whose first evaluation ends it is no mistake."""
    seen = Evaluated()
    fields = {"val_interval": 1, "epochs": 8, "ckpt_interval": 1, "always_save_latest": True}
    stopping = amago.EarlyStopping(threshold=threshold)
    e = learned(tmp_path, experiment_type=scripted([1, 2, 3, 4]), callbacks=[seen, stopping], **fields)
    trained = epoch - 1
    assert (e.epoch, len(seen.weights), e.grad_update_counter) == (epoch, epoch, trained * e.train_batches_per_epoch)
    assert e.env_steps == trained * e.train_timesteps_per_epoch * e.parallel_actors
    for last in (tiny.weights(e), dict(amago.load_policy(e.run_dir).agent.state_dict())):
        assert not tiny.differing(seen.weights[-1], last)


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
def test_weights_of_the_best_evaluation_are_kept(tmp_path, mode, best):
    returns = [2.0, 1.0, 5.0, 5.0, float("nan")]  # the first of equal ones
    seen, fields = Evaluated(), {"val_interval": 1, "epochs": len(returns), "ckpt_interval": 1, "ema_decay": 0.9}
    e = learned(tmp_path, experiment_type=scripted(returns), callbacks=[seen, amago.KeepBest(mode=mode)], **fields)
    kept = load_weight_file(e.run_dir / "ckpts" / "best" / "policy.pt").weights
    assert [i for i, weights in enumerate(seen.weights) if not tiny.differing(weights, kept)] == [best]
    best_policy = amago.load_policy(e.run_dir / "ckpts" / "best").agent.state_dict()
    assert tiny.differing(best_policy, amago.load_policy(e.run_dir).agent.state_dict())


def killed(*_, **__):
    """The end of the process, as far as the run can see: nothing is saved any more."""
    raise KeyboardInterrupt


def test_a_kill_does_not_cost_the_best_weights(tmp_path):
    def run(returns, *callbacks, **options):
        keep = amago.KeepBest()
        options = {"val_interval": 1, "ckpt_interval": 4, "epochs": 8} | options
        return started(tmp_path, experiment_type=scripted(returns), callbacks=[keep, *callbacks], **options), keep

    kill = type("Kill", (amago.Callback,), {"on_epoch_end": lambda self, e, metrics: e.epoch == 6 and killed()})()
    e, _ = run([1.0, 2.0, 3.0, 3.5, 4.0, 9.0], kill)
    with pytest.raises(KeyboardInterrupt):
        e.learn()
    e.close()
    best = tmp_path / "run" / "ckpts" / "best" / "policy.pt"
    before = best.read_bytes()
    e, keep = run([4.1, 4.6, 4.2], resume="auto")
    assert (e.epoch, keep.best) == (5, 9.0), "the training state is older than the best weights"
    e.learn()
    e.close()
    assert best.read_bytes() == before
    e, keep = run([9.5], resume="auto", epochs=9)
    e.learn()
    assert best.read_bytes() != before


def test_each_training_state_has_its_weights(tmp_path, monkeypatch):
    e = learned(tmp_path, ckpt_interval=1)
    e.train_epoch()
    monkeypatch.setattr(checkpoint, "save_training_state", killed)  # in the midst of a save
    e.epoch = 1
    with pytest.raises(KeyboardInterrupt):
        e.save_checkpoint()
    states = {checkpoint.epoch_of(p) for p in checkpoint.training_states(e.run_dir / "ckpts" / "training_states")}
    weights = {int(p.stem.rpartition("_")[2]) for p in (e.run_dir / "ckpts" / "policy_weights").glob("*.pt")}
    assert states <= weights
    assert states == {0}


def test_best_weights_that_cannot_be_kept_do_not_end_the_run(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    e = started(tmp_path)
    monkeypatch.setattr("amago.run.rundir.save_weights", full)
    assert not e.write_best_policy()
    assert "the weights of the best evaluation could not be kept: [Errno 28] No space left on device" in caplog.text
