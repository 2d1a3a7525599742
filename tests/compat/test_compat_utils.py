"""`amago.utils` as scripts for the original system use it."""

import subprocess
import sys
import warnings

import gin
import numpy as np
import pytest
import torch

from amago import cli_utils, utils


def test_environments_may_import_it_in_processes_without_torch():
    code = "import sys; from amago.utils import AmagoWarning, amago_warning, call_async_env; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = utils.nothing


def test_every_listed_name_exists():
    assert all(getattr(utils, name) is not None for name in utils.__all__)


def test_warnings():
    with pytest.warns(utils.AmagoWarning, match="look out") as seen:
        utils.amago_warning("look out")
    assert seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="old"):
        utils.amago_warning("old", category=DeprecationWarning)
    assert issubclass(utils.AmagoWarning, Warning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", utils.AmagoWarning)
        utils.amago_warning("not shown")


def test_calls_of_asynchronous_environments():
    class Pool:
        def call_async(self, name, *args):
            self.asked = name, args

        def call_wait(self):
            return [self.asked] * 2

    assert utils.call_async_env(Pool(), "take_long_break", 3) == [("take_long_break", (3,))] * 2


def test_means_over_masks_and_gradient_norms():
    x, mask = torch.tensor([[1.0, 2.0], [3.0, 100.0]]), torch.tensor([[True, True], [True, False]])
    assert utils.masked_avg(x, mask).item() == pytest.approx(6 / (3 + 1e-5), abs=1e-7)
    assert utils.masked_avg(x, torch.zeros(2, 2)).item() == 0.0
    layer = torch.nn.Linear(3, 1)
    assert utils.get_grad_norm(layer) == 0.0
    layer(torch.ones(1, 3)).sum().backward()
    norm = utils.get_grad_norm(layer)
    assert isinstance(norm, float)
    assert norm == pytest.approx(2.0)
    assert utils.count_params(layer) == 4


def test_dicts_of_arrays():
    rows = [{"a": np.full((2, 3), i), "b": np.array([i])} for i in range(4)]
    stacked = utils.stack_list_array_dicts(rows)
    assert stacked["a"].shape == (4, 2, 3)
    assert stacked["b"].tolist() == [[0], [1], [2], [3]]
    assert utils.stack_list_array_dicts(rows, axis=1)["a"].shape == (2, 4, 3)
    assert utils.stack_list_array_dicts(rows, axis=0, cat=True)["a"].shape == (8, 3)
    parts = utils.split_dict(stacked, axis=0)
    assert len(parts) == 4
    assert parts[2]["a"].shape == (1, 2, 3)
    assert (parts[2]["a"] == 2).all()
    assert [p.shape for p in utils.split_batch(np.zeros((2, 5)), axis=1)] == [(2, 1)] * 5
    assert [p.shape for p in utils.split_batch(torch.zeros(2, 5), axis=-1)] == [(2, 1)] * 5
    with pytest.raises(ValueError, match="empty"):
        utils.stack_list_array_dicts([])
    with pytest.raises(ValueError, match=r"list_\[1\]"):
        utils.stack_list_array_dicts([{"a": np.zeros(1)}, {"b": np.zeros(1)}])
    with pytest.raises(ValueError, match="'b': 2"):
        utils.split_dict({"a": np.zeros(3), "b": np.zeros(2)})


def test_the_schedule_warms_up_and_stays():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = utils.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=4)
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0, 0.125, 0.25, 0.375, 0.5, 0.5])


def test_checkpoints_are_loaded_without_running_code(tmp_path):
    assert utils.retry_load_checkpoint(tmp_path / "missing.pt", map_location="cpu") is None
    torch.save({"w": torch.ones(2)}, tmp_path / "policy.pt")
    assert utils.retry_load_checkpoint(str(tmp_path / "policy.pt"), map_location="cpu")["w"].tolist() == [1.0, 1.0]
    torch.save({"w": subprocess.Popen}, tmp_path / "code.pt")
    with pytest.raises(Exception, match=r"(?i)weights_only|unsupported"):
        utils.retry_load_checkpoint(tmp_path / "code.pt", map_location="cpu", tries=1)
    with pytest.raises(ValueError, match="tries=0"):
        utils.retry_load_checkpoint(tmp_path / "policy.pt", map_location="cpu", tries=0)


def test_settings_for_loggers():
    cli_utils.use_config({"FFTstepEncoder.d_hidden": 7, "Agent.fbc_filter_func": __import__("amago").agent.exp_filter})
    config = utils.gin_as_wandb_config()
    assert config["amago.nets.tstep_encoders.FFTstepEncoder.d_hidden"] == 7
    assert "exp_filter" in config["amago.agent.Agent.fbc_filter_func"]


def test_reductions_over_one_process():
    data = {"b": 2, "a": torch.tensor(0.5)}
    assert list(utils.avg_over_accelerate(data).items()) == [("b", 2.0), ("a", 0.5)]
    assert utils.sum_over_accelerate(data) == {"b": 2.0, "a": 0.5}
    assert utils.sum_over_accelerate({}) == {}


def test_adamw_that_counts_anew():
    def train(make, steps):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = make([parameter])
        for i in range(steps):
            parameter.grad = torch.full((3,), 1.0 + i)
            optimizer.step()
        return parameter.detach().clone()

    rel, plain = (lambda p: utils.AdamWRel(p, reset_interval=4)), (lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert train(rel, 4).equal(train(plain, 4))
    assert not train(rel, 5).equal(train(plain, 5))
    cli_utils.use_config({"AdamWRel.reset_interval": 2, "AdamWRel.lr": 0.1})
    optimizer = utils.AdamWRel([torch.nn.Parameter(torch.zeros(1))])
    assert (optimizer.reset_interval, optimizer.param_groups[0]["lr"]) == (2, 0.1)
    gin.clear_config()
    with pytest.raises(RuntimeError, match="reset_interval"):
        utils.AdamWRel([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="reset_interval=0"):
        utils.AdamWRel([torch.nn.Parameter(torch.zeros(1))], reset_interval=0)
