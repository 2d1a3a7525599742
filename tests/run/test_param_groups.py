"""Parts of the agent with learning rates of their own, and weight decay of weights alone."""

import pytest
import tiny
import torch
from messages import naming
from tiny import experiment, learned, started

from amago.agent import BaseAgent
from amago.loading import DiskTrajDataset
from amago.nets import traj_encoders
from amago.run.checkpoint import CheckpointError
from amago.run.checks import SettingsError
from amago.run.param_groups import param_groups, without_weight_decay

OWN = {"actor_learning_rate": 3e-4, "critic_learning_rate": 2e-3, "traj_learning_rate": 5e-4}


def rates(e):
    """{name of a parameter: (rate, weight decay)}."""
    names = {id(p): name for name, p in e.policy.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in e.optimizer.param_groups for p in g["params"]}


def test_by_default_there_is_one_group_in_the_order_of_before(tmp_path):
    e = started(tmp_path)
    (group,) = e.optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in e.policy.trainable_params]
    assert "name" not in group
    e.close()


def test_every_parameter_has_the_rate_of_its_part(tmp_path):
    e = started(tmp_path, lr_warmup_steps=0, learning_rate=1e-3, l2_coeff=0.1, **OWN)
    found = rates(e)
    assert len(found) == len(list(e.policy.trainable_params))
    of = {"actor": 3e-4, "critics": 2e-3, "traj_encoder": 5e-4, "tstep_encoder": 1e-3}
    assert found == {name: (of[name.partition(".")[0]], 0.1) for name in found}
    assert {name.partition(".")[0] for name in found} == set(of)
    e.close()


def test_the_schedule_applies_to_all(tmp_path):
    e = learned(tmp_path, lr_warmup_steps=4, learning_rate=1e-3, **OWN)  # 2 updates
    share = {
        name: lr / {"actor": 3e-4, "critics": 2e-3, "traj_encoder": 5e-4, "tstep_encoder": 1e-3}[name.partition(".")[0]]
        for name, (lr, _) in rates(e).items()
    }
    assert all(s == pytest.approx(3 / 4) for s in share.values()), "the third of four steps of warm-up"
    assert tiny.rows(e.run_dir, "train")[-1]["values"]["Learning Rate"] == pytest.approx(5 / 8 * 1e-3), (
        "that of the other parts, after each update"
    )
    e.close()


def test_groups_that_are_all_alike_train_as_one(tmp_path):
    same = dict.fromkeys(OWN, 0.001)
    plain, grouped = (
        learned(tmp_path / "a", learning_rate=1e-3, seed=3),
        learned(tmp_path / "b", learning_rate=1e-3, seed=3, **same),
    )
    assert len(grouped.optimizer.param_groups) == 4
    for (name, a), (_, b) in zip(plain.policy.state_dict().items(), grouped.policy.state_dict().items()):
        assert torch.equal(a, b), name
    plain.close()
    grouped.close()


def test_a_higher_rate_moves_its_part_alone(tmp_path):
    """One update from the same weights and gradients."""
    runs = [
        learned(
            tmp_path / str(rate),
            seed=3,
            train_batches_per_epoch=1,
            learning_rate=1e-3,
            l2_coeff=0.0,
            **({"critic_learning_rate": rate} if rate else {}),
        )
        for rate in (None, 1e-2)
    ]
    (a, b) = (e.policy for e in runs)
    assert all(torch.equal(x, y) for x, y in zip(a.actor.parameters(), b.actor.parameters()))
    assert not all(torch.equal(x, y) for x, y in zip(a.critics.parameters(), b.critics.parameters()))
    for e in runs:
        e.close()


@pytest.mark.parametrize("traj", ["ff", "gru", "transformer", traj_encoders.MambaTrajEncoder, traj_encoders.MinGRUTrajEncoder])
def test_weights_decay_and_nothing_else(traj):
    agent = tiny.agent(tiny.pendulum(), traj)
    plain = without_weight_decay(agent)
    for name, p in agent.named_parameters():
        module = agent.get_submodule(name.rpartition(".")[0])
        last = name.rpartition(".")[2]
        weight = last.startswith("weight") and not isinstance(module, torch.nn.LayerNorm)
        assert (id(p) not in plain) == weight, name


def test_without_gradient_weights_shrink_and_biases_stay(tmp_path):
    e = started(tmp_path, l2_weights_only=True, l2_coeff=0.5, lr_warmup_steps=0, learning_rate=0.1)
    before = {name: p.detach().clone() for name, p in e.policy.named_parameters()}
    for p in e.policy.trainable_params:
        p.grad = torch.zeros_like(p)
    e.updater.step(False)
    plain, trained = without_weight_decay(e.policy), {id(p) for p in e.policy.trainable_params}
    for name, p in e.policy.named_parameters():
        if id(p) in trained:
            torch.testing.assert_close(p.detach(), before[name] * (1.0 if id(p) in plain else 1 - 0.1 * 0.5), msg=name)
    e.close()


# ---- resume --------------------------------------------------------------------------------------------------------------


def moments(e):
    names = {id(p): name for name, p in e.policy.named_parameters()}
    state = e.optimizer.state
    return {names[id(p)]: state[p]["exp_avg"].clone() for g in e.optimizer.param_groups for p in g["params"] if p in state}


CHOICES = [{}, {"l2_weights_only": True}, {"l2_weights_only": True, **OWN}]


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_a_choice_that_has_changed_is_said_and_every_parameter_keeps_its_moments(tmp_path, capsys, before, now):
    e = learned(tmp_path, ckpt_interval=1, **CHOICES[before])
    want = moments(e)
    e.close()
    e = started(tmp_path, resume="auto", epochs=2, verbose=True, **CHOICES[now])
    out = capsys.readouterr().out
    differing = {k for k in (*OWN, "l2_weights_only") if CHOICES[before].get(k) != CHOICES[now].get(k)}
    assert all(f"{name} " in out for name in differing)
    found = moments(e)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    e.learn()
    assert e.epoch == 2
    e.close()


def test_the_same_choice_goes_on_as_if_never_stopped(tmp_path):
    """On recorded data, as environments begin anew in a resumed run."""
    learned(tmp_path, name="recorded", train_batches_per_epoch=0).close()
    fields = {"start_collecting_at_epoch": float("inf"), "share_buffer": True, "ckpt_interval": 1, **CHOICES[2]}

    def run(function, name, **more):
        e = function(tmp_path, name=name, dataset=DiskTrajDataset(tmp_path, "recorded"), **fields, **more)
        found = tiny.weights(e)
        e.close()
        return found

    want = run(learned, "whole", epochs=2)
    run(learned, "parts", epochs=1)
    assert tiny.differing(want, run(learned, "parts", epochs=2, resume="auto")) == []


def test_a_training_state_without_names_is_refused_with_the_groups(tmp_path):
    from amago.run import checkpoint

    e = learned(tmp_path, ckpt_interval=1)
    directory = e.ckpt_dir / "training_states" / "run_epoch_0"
    e.close()
    weights, tensors, content = checkpoint.load_training_state(directory)
    del content["optimizer_parameters"]  # as earlier versions saved it
    checkpoint.save_training_state(directory, weights, tensors, content)
    started(tmp_path, resume="auto", epochs=2).close()
    with pytest.raises(CheckpointError, match=naming("groups", "run_epoch_0")):
        started(tmp_path, resume="auto", epochs=2, l2_weights_only=True)


# ---- overrides, mistakes -------------------------------------------------------------------------------------------------


def test_an_own_optimizer_takes_the_groups(tmp_path):
    class Momentum(type(experiment(tmp_path))):
        def init_optimizer(self, policy):
            return torch.optim.SGD(param_groups(policy, self), lr=self.learning_rate, momentum=0.5)

    e = started(tmp_path, experiment_type=Momentum, lr_warmup_steps=0, l2_weights_only=True, **OWN)
    assert rates(e)["actor.base.in_layer.weight"] == (3e-4, e.l2_coeff)
    assert rates(e)["actor.base.in_layer.bias"] == (3e-4, 0.0)
    e.close()


def test_an_own_optimizer_that_ignores_what_was_set_is_refused(tmp_path):
    class Momentum(type(experiment(tmp_path))):
        def init_optimizer(self, policy):
            return torch.optim.SGD(policy.trainable_params, lr=self.learning_rate)

    with pytest.raises(SettingsError, match=naming("init_optimizer", "critic_learning_rate", "param_groups")):
        started(tmp_path, experiment_type=Momentum, critic_learning_rate=1e-3)
    started(tmp_path, experiment_type=Momentum).close()


def test_a_rate_of_a_part_that_the_agent_lacks(tmp_path):
    class Encoders(BaseAgent):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.tstep_encoder = self.traj_encoder = torch.nn.Linear(2, 2)

    e = experiment(tmp_path, critic_learning_rate=0.25)
    with pytest.raises(SettingsError, match=naming("critic_learning_rate", 0.25, "Encoders", "critics")):
        param_groups(Encoders(), e)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_learning_rate", 0.0),
        ("critic_learning_rate", "high"),
        ("traj_learning_rate", float("inf")),
        ("l2_weights_only", 1),
    ],
)
def test_wrong_values_are_named(tmp_path, name, value):
    with pytest.raises(SettingsError, match=naming(name, value)):
        started(tmp_path, **{name: value})


def test_gains_of_normalised_critics_do_not_decay(tmp_path):
    tiny.config.bind({"NCritics.normalization": "layer"})
    e = tiny.started(tmp_path, l2_weights_only=True)
    plain = {id(p) for g in e.optimizer.param_groups if g["weight_decay"] == 0.0 for p in g["params"]}
    norms = [p for name, p in e.policy.critics.named_parameters() if "norms" in name]
    assert len(norms) == 4
    assert {id(p) for p in norms} <= plain
