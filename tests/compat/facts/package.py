# fact: the version is at least 3.4.0, compared as text
import importlib.metadata

import amago

assert amago.__version__ >= "3.4.0"
assert importlib.metadata.version("amago") == amago.__version__

# fact: parts are registered by a name, once, and found by it
import pytest

for kind, known in {
    "agent": {"agent", "multitask"}, "tstep_encoder": {"ff", "cnn"}, "traj_encoder": {"ff", "rnn", "transformer", "mamba", "identity"},
    "exploration": {"egreedy", "bilevel"},
}.items():  # fmt: skip
    assert known <= set(getattr(amago, f"list_registered_{kind}s")())
    register, find = getattr(amago, f"register_{kind}"), getattr(amago, f"get_{kind}_cls")
    mine = register("mine")(type("Mine", (), {}))
    assert find("mine") is mine
    with pytest.raises(ValueError, match="mine"):
        register("mine")(type("Other", (), {}))
    with pytest.raises(KeyError):
        find("nothing")

# fact: warnings have a class of their own
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    amago.utils.amago_warning("careful")
    amago.utils.amago_warning("old", category=DeprecationWarning)
assert [w.category for w in caught] == [amago.utils.AmagoWarning, DeprecationWarning]
assert issubclass(amago.utils.AmagoWarning, Warning)

# fact: masked means, gradient norms and counts of parameters
import torch

x = torch.tensor([1.0, 2.0, 30.0])
assert torch.isclose(amago.utils.masked_avg(x, torch.tensor([True, True, False])), torch.tensor(3.0 / (2 + 1e-5)))
net = torch.nn.Linear(2, 1, bias=False)
net(torch.ones(1, 2)).sum().backward()
assert isinstance(amago.utils.get_grad_norm(net), float)
assert abs(amago.utils.get_grad_norm(net) - 2**0.5) < 1e-6
assert amago.utils.count_params(net) == 2

# fact: dicts of arrays are stacked and split
import numpy as np

d = amago.utils.stack_list_array_dicts([{"a": np.zeros(2)}, {"a": np.ones(2)}], axis=0)
assert d["a"].shape == (2, 2)
assert amago.utils.stack_list_array_dicts([{"a": np.zeros((1, 2))}] * 3, axis=0, cat=True)["a"].shape == (3, 2)
assert [p["a"].shape for p in amago.utils.split_dict(d, axis=0)] == [(1, 2), (1, 2)]
assert [p.shape for p in amago.utils.split_batch(np.zeros((4, 3)), axis=1)] == [(4, 1)] * 3

# fact: a schedule that warms up
import torch
from torch.optim.lr_scheduler import LambdaLR

opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
schedule = amago.utils.get_constant_schedule_with_warmup(opt, num_warmup_steps=4)
rates = []
for _ in range(6):
    rates.append(opt.param_groups[0]["lr"])
    opt.step()
    schedule.step()
assert isinstance(schedule, LambdaLR)
assert rates == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]

# fact: checkpoints are loaded, and None where there is none
import tempfile

import torch

with tempfile.TemporaryDirectory() as root:
    assert amago.utils.retry_load_checkpoint(f"{root}/x.pt", map_location="cpu", tries=2) is None
    torch.save({"w": torch.ones(2)}, f"{root}/x.pt")
    assert amago.utils.retry_load_checkpoint(f"{root}/x.pt", map_location="cpu")["w"].tolist() == [1.0, 1.0]

# fact: bindings for loggers, and sums and means over processes
amago.cli_utils.use_config({"amago.agent.Agent.tau": 0.01})
assert any(k.endswith("Agent.tau") and v == 0.01 for k, v in amago.utils.gin_as_wandb_config().items())
assert amago.utils.avg_over_accelerate({"a": 1.0}) == amago.utils.sum_over_accelerate({"a": 1.0}) == {"a": 1.0}

# fact: an optimizer that forgets its step count
import torch

p = torch.nn.Parameter(torch.ones(2))
opt = amago.utils.AdamWRel([p], reset_interval=3, lr=1e-2)
for _ in range(4):
    p.grad = torch.ones(2)
    opt.step()
assert float(opt.state[p]["step"]) == 1.0

# fact: settings are bound by any suffix of the module's name
import inspect

import gin

import amago.nets.policy_dists
import amago.nets.traj_encoders
import amago.nets.tstep_encoders
from amago.cli_utils import use_config

NAMES = """
Agent.critic_loss_weight agent.Agent.tau leaky_relu_filter.tau leaky_relu_filter.target_f0 leaky_relu_filter.add_binary
exp_filter.clip_adv_low exp_filter.clip_adv_high NCriticsTwoHot.label_type NCriticsTwoHot.sigma Actor.discrete_dist_type
ResidualActor.feature_dim actor_critic.PopArtLayer.beta amago.nets.actor_critic.PopArtLayer.init_nu
FlashAttention.window_size SigmaReparam.fast_init LearnablePosEmb.max_time_idx FFTstepEncoder.auto_scale FFTstepEncoder.norm
utils.InputNorm.beta amago.nets.utils.InputNorm.init_nu NatureishCNN.channels GMM.std_low GMM.std_high Beta.alpha_low
Beta.std_activation TanhGaussian.std_activation TanhGaussian.clip_actions_on_log_prob
DiscreteLikeContinuous.gumbel_softmax_temperature DiskTrajDataset.dset_min_size loading.DiskTrajDataset.dset_max_size
AdamWRel.reset_interval utils.AdamWRel.lr SimNorm.dim ff.SimNorm.dim Multigammas.discrete
traj_encoders.TformerTrajEncoder.attention_type GRUTrajEncoder.d_hidden FFTrajEncoder.out_norm MambaTrajEncoder.d_state
CNNTstepEncoder.aug_pct_of_batch BilevelEpsilonGreedy.rollout_horizon EpsilonGreedy.eps_start Experiment.learning_rate
amago.experiment.Experiment.l2_coeff MultiTaskAgent.num_critics SlidingWindowFlexAttention.window_size Agent.actor_type
MultiTaskAgent.fbc_filter_func NCriticsTwoHot.init_value Actor.continuous_dist_type ResidualActor.discrete_dist_type
actor_critic.PopArtLayer.enabled Beta.alpha_high policy_dists.Discrete.clip_prob_high MixtureOfDatasets.smooth_sudden_starts
exp_filter.clip_weights_high FlexAttention.score_mod GridworldCNN.channels binary_filter.threshold VanillaAttention.dropout
"""
for name in NAMES.split():
    selector, _, parameter = name.rpartition(".")
    value = inspect.signature(gin.get_configurable(selector)).parameters[parameter].default
    use_config({name: 7 if value is gin.REQUIRED else value}, finalize=False)

# fact: older scripts take what they need from cli_utils
from amago.cli_utils import *

assert (gin.__name__, EpsilonGreedy.__name__, DiskTrajDataset.__name__, Agent.__name__) == (
    "gin", "EpsilonGreedy", "DiskTrajDataset", "Agent",
)  # fmt: skip
assert amago.Experiment is Experiment

# fact: checkpoints that hold code are not loaded
import pickle
import subprocess
import tempfile

import pytest
import torch

with tempfile.TemporaryDirectory() as root:
    torch.save({"w": subprocess.Popen}, f"{root}/code.pt")
    with pytest.raises(pickle.UnpicklingError):
        amago.utils.retry_load_checkpoint(f"{root}/code.pt", map_location="cpu", tries=1)
