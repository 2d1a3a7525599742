"""Updates: warm-up, rates of parts, clipping, skipping of non-finite losses and gradients, accumulation."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from accelerate import Accelerator
from messages import refused
from tiny import learned, started
from torch import nn

import amago
from amago.loading import collate
from amago.run.learner import MAX_SKIPPED_IN_A_ROW, Learner, NonFiniteTraining, param_groups
from amago.run.optimizer import adamw, lr_factor, lr_schedule
from amago.run.settings import SettingsError


class Line(nn.Module):
    """A model with two trained weights, a frozen one, and a target."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.zeros(1))
        self.synced_at = []

    @property
    def trainable_params(self):
        return [self.a, self.b]

    def get_grad_norms(self):
        return {"Actor Grad Norm": torch.stack([p.grad for p in self.actor]).norm()}

    def soft_sync_targets(self):
        self.synced_at.append(float(self.a.detach()))


def make_updater(grad_clip=1.0, steps=4, lr=0.1):
    line = Line()
    optimizer = adamw(line.trainable_params, lr, 0.0)
    learner = Learner(SimpleNamespace(grad_clip=grad_clip, ema_decay=0.0))
    learner.accelerator, learner.optimizer = Accelerator(cpu=True), optimizer
    learner.lr_schedule = lr_schedule(optimizer, steps, 1_000, 0.0)
    learner.use(line)
    return line, learner


def set_grads(line, a, b, frozen=None):
    line.a.grad, line.b.grad = torch.tensor([float(a)]), torch.tensor([float(b)])
    line.frozen.grad = None if frozen is None else torch.tensor([float(frozen)])


@pytest.mark.parametrize(
    ("warmup", "total", "cooldown", "wanted"),
    [
        (2, 8, 0.5, [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.25, 0.25]),
        (0, 4, 1.0, [1, 0.75, 0.5, 0.25, 0.25]),
        (4, 4, 0.5, [0.25, 0.5, 0.75, 0.5, 0.5]),
        (0, 4, 0.2, [1, 1, 1, 1, 1]),
        (0, 0, 0.5, [1, 1]),
    ],
)
def test_learning_rate_falls_at_the_end(warmup, total, cooldown, wanted):
    assert [lr_factor(step, warmup, total, cooldown) for step in range(len(wanted))] == pytest.approx(wanted)


def test_clipping_sees_trained_parameters_only():
    line, updater = make_updater(grad_clip=1.0)
    seen = []
    updater.optimizer.register_step_pre_hook(lambda *_: seen.append((float(line.a.grad), float(line.b.grad))))
    set_grads(line, 3, 4, frozen=1e9)
    metrics = updater.update(False)
    assert float(metrics["Gradient Norm"]) == pytest.approx(5.0)  # before clipping, and without the frozen weight
    assert seen == [pytest.approx((0.6, 0.8), rel=1e-5)]


def test_the_norms_of_parts_do_not_contain_the_scale_of_float16():
    line, updater = make_updater()
    line.actor = nn.ParameterList([line.a, line.b])
    set_grads(line, 3, 4)
    assert float(updater.update(True)["Actor Grad Norm"]) == pytest.approx(5.0)
    updater.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    set_grads(line, 3, 4)
    assert float(updater.update(True)["Actor Grad Norm"]) == pytest.approx(5.0 / 1024.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_enough(bad):
    """A squared error can overflow where its gradient does not."""
    line, updater = make_updater()
    set_grads(line, 1, 1)
    assert updater.update(False, torch.tensor(bad))["Skipped Updates"] == 1.0
    assert float(line.a.detach()) == 0.0
    set_grads(line, 1, 1)
    assert updater.update(False, torch.tensor(3.0, requires_grad=True))["Skipped Updates"] == 1.0
    assert (updater.skipped, updater.grad_steps) == (1, 1)


def test_twenty_in_a_row_stop_the_run_but_a_good_step_between_does_not():
    line, updater = make_updater()
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        set_grads(line, float("nan"), 1)
        updater.update(False)
    set_grads(line, 1, 1)
    updater.update(False)
    before = float(line.a.detach())
    for _ in range(19):
        set_grads(line, float("nan"), 1)
        updater.update(False)
    set_grads(line, float("nan"), 1)
    with refused(NonFiniteTraining, 20, "observations", "rewards"):
        updater.update(False)
    assert float(line.a.detach()) == before


def test_two_halves_make_the_gradient_of_the_whole(tmp_path):
    e = tiny.learned(tmp_path, batches_per_update=2, grad_clip=1e9)
    e.policy.eval()  # running statistics do not change
    samples = [e.dataset.sample_random_trajectory(np.random.default_rng(i)) for i in range(4)]
    assert {len(s) for s in samples} == {tiny.EPISODE}
    gradients = []
    e.optimizer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in e.policy.trainable_params])
    )
    torch.manual_seed(3)  # the same two critics are drawn for the targets
    e.policy(collate(samples), False).backward()
    whole = [p.grad.clone() for p in e.policy.trainable_params]
    e.optimizer.zero_grad()
    for half in (samples[:2], samples[2:]):
        torch.manual_seed(3)
        e.train_step(collate(half), log_step=False)
    assert any(g.abs().max() > 1e-3 for g in whole)
    for a, b in zip(whole, *gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Scaled(amago.Experiment):
    """Changes one of the terms of the loss, or the whole."""

    def compute_loss(self, batch, log_step):
        metrics = super().compute_loss(batch, log_step)
        if self.run_name == "whole":
            metrics["Loss"] = 0.0 * metrics["Actor Loss"]
        elif self.run_name != "plain":
            metrics[self.run_name] = 0.0 * metrics[self.run_name]
        return metrics


@pytest.mark.parametrize("term", ["plain", "Actor Loss", "Critic Loss", "whole"])
def test_an_override_changes_a_term_or_the_whole(term, tmp_path):
    e = tiny.learned(tmp_path, experiment_type=Scaled, name=term, l2_coeff=0.0)
    now, fresh = e.policy.state_dict(), tiny.started(tmp_path, name="untrained", l2_coeff=0.0).policy.state_dict()
    moved = {part: not now[name].equal(fresh[name]) for part, name in LAYERS.items()}
    assert moved == {"actor": term not in ("Actor Loss", "whole"), "critics": term not in ("Critic Loss", "whole")}


LAYERS = {"actor": "actor.base.out_layer.weight", "critics": "critics.net.output_layer.weight"}


OWN = {"actor_learning_rate": 3e-4, "critic_learning_rate": 2e-3}


def rates(e):
    """{name of a parameter: (rate, weight decay)}."""
    names = {id(p): name for name, p in e.policy.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in e.optimizer.param_groups for p in g["params"]}


def test_every_parameter_has_the_rate_of_its_part(tmp_path):
    e = started(tmp_path, lr_warmup_steps=0, learning_rate=1e-3, l2_coeff=0.1, **OWN)
    found = rates(e)
    assert len(found) == len(list(e.policy.trainable_params))
    of = {"actor": 3e-4, "critics": 2e-3, "traj_encoder": 1e-3, "tstep_encoder": 1e-3}
    assert found == {name: (of[name.partition(".")[0]], 0.1) for name in found}
    assert {name.partition(".")[0] for name in found} == set(of)


def moments(e):
    names = {id(p): name for name, p in e.policy.named_parameters()}
    state = e.optimizer.state
    return {names[id(p)]: state[p]["exp_avg"].clone() for g in e.optimizer.param_groups for p in g["params"] if p in state}


CHOICES = [{}, {"critic_learning_rate": 2e-3}, OWN]


@pytest.mark.parametrize(("before", "now"), [(0, 1), (2, 1)])
def test_a_choice_that_has_changed_is_said_and_every_parameter_keeps_its_moments(tmp_path, capsys, before, now):
    e = learned(tmp_path, ckpt_interval=1, **CHOICES[before])
    want = moments(e)
    e.close()
    e = started(tmp_path, resume="auto", epochs=2, verbose=True, **CHOICES[now])
    out = capsys.readouterr().out
    differing = {k for k in OWN if CHOICES[before].get(k) != CHOICES[now].get(k)}
    assert all(f"{name} " in out for name in differing)
    found = moments(e)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    e.learn()
    assert e.epoch == 2


class Momentum(amago.Experiment):
    """Has an optimizer of its own."""

    def init_optimizer(self, policy):
        groups = policy.trainable_params if self.run_name == "one rate" else param_groups(policy, self)
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=0.5)


def test_an_own_optimizer_takes_the_groups_or_is_refused_where_it_ignores_what_was_set(tmp_path):
    e = started(tmp_path, experiment_type=Momentum, lr_warmup_steps=0, **OWN)
    for name in ("weight", "bias"):
        assert rates(e)[f"actor.base.in_layer.{name}"] == (3e-4, e.l2_coeff)
    with refused(SettingsError, "init_optimizer", "critic_learning_rate", "param_groups"):
        started(tmp_path, experiment_type=Momentum, name="one rate", critic_learning_rate=1e-3)
    started(tmp_path, experiment_type=Momentum, name="one rate")
