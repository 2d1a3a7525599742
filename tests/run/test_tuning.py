"""Search spaces, and the callback between a run and a trial."""

import optuna
import pytest
import tiny
from messages import refused

from amago.run.metric_names import AVERAGE_RETURN
from amago.run.tuning import PruneTrial, parse_space, value_of


def drawn(text, n=60):
    space = parse_space([text])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [value_of(stored) for _ in range(n) for stored in study.ask(space).params.values()]


def test_what_is_drawn():
    assert all(-1 <= v <= 2 for v in drawn("a=uniform(-1, 2)"))
    small = drawn("a=loguniform(1e-6,1)")
    assert all(1e-6 <= v <= 1 for v in small)
    assert 15 < sum(v < 1e-3 for v in small) < 45
    assert set(drawn("a=int(1,3)")) == {1, 2, 3}
    assert all(isinstance(v, int) and 1 <= v <= 1000 for v in drawn("a=logint(1,1000)"))
    assert set(drawn("a=choice(gru, transformer)")) == {"gru", "transformer"}
    assert set(drawn("Agent.gamma = choice(0.9, None, 'x', True)")) == {0.9, None, "x", True}
    assert [0.9, 0.99] in drawn("Multigammas.discrete=choice([0.9],[0.9,0.99])")


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["learning_rate"], ("'learning_rate'", "NAME=KIND")),
        (["a=loguniform 1 2"], ("a=loguniform 1 2",)),
        (["a=log_uniform(1,2)"], ("log_uniform", "loguniform")),
        (["a=uniform(2,1)"], ("a=uniform(2,1)", "below")),
        (["a=uniform(1)"], ("a=uniform(1)", "LOW, HIGH")),
        (["a=uniform(x,2)"], ("a=uniform(x,2)", "LOW, HIGH")),
        (["a=loguniform(0,1)"], ("a=loguniform(0,1)", "positive")),
        (["a=int(1,2.5)"], ("a=int(1,2.5)", "whole")),
        (["a=choice(1)"], ("a=choice(1)", "two")),
        (["a=choice(1,1)"], ("a=choice(1,1)", "once")),
        (["a=uniform(0,1)", "a=choice(1,2)"], ("a=uniform(0,1)", "a=choice(1,2)")),
    ],
)
def test_what_cannot_be_read_is_quoted(texts, named):
    with refused(ValueError, *named):
        parse_space(texts)


def test_a_run_reports_to_its_trial(tmp_path):
    trial = optuna.create_study(direction="maximize").ask()
    prune = PruneTrial(trial)
    e = tiny.learned(tmp_path, callbacks=[prune], epochs=4, val_interval=2)
    values = {r["epoch"]: r["values"][AVERAGE_RETURN] for r in tiny.rows(e.run_dir, "val")}
    assert trial.study.trials[0].intermediate_values == values
    assert list(values) == [0, 2]
    assert prune.value == values[2]


def test_a_trial_that_is_worse_is_pruned(tmp_path):
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=100.0, n_warmup_steps=1))
    e = tiny.started(tmp_path, callbacks=[PruneTrial(study.ask())], epochs=4, val_interval=1)
    with pytest.raises(optuna.TrialPruned, match="epoch 1"):
        e.learn()
    assert e.epoch == 1


def test_an_unknown_metric(tmp_path):
    e = tiny.started(tmp_path, callbacks=[PruneTrial(optuna.create_study().ask(), "Score")], val_interval=1)
    with refused(ValueError, "'Score'", AVERAGE_RETURN):
        e.learn()
