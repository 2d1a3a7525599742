"""Parts of the agent with learning rates of their own."""

import pytest
import torch
from messages import refused
from tiny import experiment, learned, started

from amago.run.learner import param_groups
from amago.run.settings import SettingsError

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
    e.close()


# ---- resume --------------------------------------------------------------------------------------------------------------


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
    e.close()


# ---- overrides, mistakes -------------------------------------------------------------------------------------------------


def test_an_own_optimizer_takes_the_groups(tmp_path):
    class Momentum(type(experiment(tmp_path))):
        def init_optimizer(self, policy):
            return torch.optim.SGD(param_groups(policy, self), lr=self.learning_rate, momentum=0.5)

    e = started(tmp_path, experiment_type=Momentum, lr_warmup_steps=0, **OWN)
    assert rates(e)["actor.base.in_layer.weight"] == (3e-4, e.l2_coeff)
    assert rates(e)["actor.base.in_layer.bias"] == (3e-4, e.l2_coeff)
    e.close()


def test_an_own_optimizer_that_ignores_what_was_set_is_refused(tmp_path):
    class Momentum(type(experiment(tmp_path))):
        def init_optimizer(self, policy):
            return torch.optim.SGD(policy.trainable_params, lr=self.learning_rate)

    with refused(SettingsError, "init_optimizer", "critic_learning_rate", "param_groups"):
        started(tmp_path, experiment_type=Momentum, critic_learning_rate=1e-3)
    started(tmp_path, experiment_type=Momentum).close()
