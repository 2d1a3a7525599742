"""`Experiment.ema_decay`: an average of the trained weights acts in their place."""

import numpy as np
import pytest
import tiny
import torch
from tiny import learned, started

import amago
from amago.run.learner import WeightAverage

DECAY = 0.6


class Acting(amago.Callback):
    """Keeps the weights that act at the first step of each phase."""

    before = None

    def on_step(self, experiment, steps, phase):
        if phase != self.before:
            experiment.acted.append((phase, len(experiment.history), tiny.weights(experiment)))
        self.before = phase


class Watched(amago.Experiment):
    """Keeps the trained weights after each update, and those that act in each phase."""

    def __post_init__(self):
        super().__post_init__()
        self.history, self.acted = [], []
        self.callbacks = [Acting()]

    def train_step(self, batch, log_step):
        metrics = super().train_step(batch, log_step)
        self.history.append(tiny.weights(self))
        return metrics


def trained_names(e):
    own = {id(p) for p in e.policy.trainable_params}
    return [name for name, p in e.policy.named_parameters() if id(p) in own]


def assert_is_average(found, history, names):
    """In float64, from the definition; ``history`` begins with the weights before the first update."""
    for name in names:
        mean = history[0][name].double()
        for n, weights in enumerate(history[1:], start=1):
            decay = min(DECAY, (1 + n) / (10 + n))
            mean = decay * mean + (1 - decay) * weights[name].double()
        np.testing.assert_allclose(found[name], mean, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three epochs of four updates, with the weights before the first update."""
    root = tmp_path_factory.mktemp("averaged")
    e = started(
        root, tiny.tmaze, "transformer", Watched, ema_decay=DECAY, epochs=3, val_interval=1, ckpt_interval=1,
        always_save_latest=True, train_batches_per_epoch=4, learning_rate=1e-2, keep_training_states=None,
    )  # fmt: skip
    e.history.append(tiny.weights(e))
    e.learn()
    e.evaluate_test(tiny.tmaze, timesteps=tiny.EPISODE + 1)
    return e


def test_what_acts_is_the_average_in_every_phase_and_training_goes_on_from_the_trained_weights(run):
    trained = {p.data_ptr() for p in run.policy.trainable_params}  # some have a second name
    rest = [name for name, value in run.policy.state_dict().items() if value.data_ptr() not in trained]
    assert any("target" in name for name in rest)
    assert [title for title, _, _ in run.acted] == ["evaluate", "collect"] * 3 + ["test"]
    assert [updates - 1 for _, updates, _ in run.acted] == [0, 0, 4, 4, 8, 8, 12]
    for _, updates, weights in run.acted:
        assert_is_average(weights, run.history[:updates], trained_names(run))
        assert not [name for name in rest if not weights[name].equal(run.history[updates - 1][name])]
    assert len(run.history) == 13
    assert not tiny.differing(tiny.weights(run), run.history[-1]), "evaluating put them back"
    largest = max((a - b).abs().max() for a, b in zip(tiny.weights(run).values(), run.acted[-1][2].values()))
    assert largest > 1e-3, "the test above would pass without an average"


@pytest.mark.parametrize("file", ["policy.pt", "ckpts/policy_weights/policy_epoch_2.pt", "ckpts/training_states/run_epoch_2"])
def test_what_is_published_is_the_average(run, file):
    from amago import load_policy

    loaded = load_policy(run.run_dir / file).agent.state_dict()
    assert_is_average(loaded, run.history, trained_names(run))


def test_an_exception_puts_the_trained_weights_back():
    agent = tiny.agent(tiny.tmaze())
    average = WeightAverage(agent, 0.9)
    with torch.no_grad():
        for p in agent.trainable_params:
            p.add_(1.0)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), average.acting():
        assert tiny.differing(before, agent.state_dict())
        raise KeyboardInterrupt
    assert not tiny.differing(before, agent.state_dict())


FIELDS = {"ema_decay": DECAY, "ckpt_interval": 1, "train_batches_per_epoch": 3, "learning_rate": 1e-2}


def both(e):
    """The trained weights, and those that act."""
    trained = tiny.weights(e)
    with e.acting_weights():
        return trained, tiny.weights(e)


def test_a_run_may_go_on_without_the_average_and_begin_one(tmp_path):
    e = learned(tmp_path, **FIELDS)
    trained, acting = both(e)
    assert tiny.differing(trained, acting)
    e.close()
    e = started(tmp_path, **FIELDS | {"ema_decay": 0.0}, resume="auto", epochs=2)
    for found in both(e):
        assert not tiny.differing(trained, found)
    e.learn()
    trained = tiny.weights(e)
    e.close()
    e = started(tmp_path, **FIELDS, resume="auto", epochs=3)
    for found in both(e):
        assert not tiny.differing(trained, found)
    e.learn()
    assert tiny.differing(*both(e))


def test_weights_that_are_loaded_begin_the_average_anew(tmp_path):
    e = learned(tmp_path, **FIELDS)
    _, acting = both(e)
    e.load_checkpoint(0, resume_training_state=False)
    for found in both(e):
        assert not tiny.differing(acting, found)
