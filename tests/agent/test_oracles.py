"""Losses and gradients of whole agents against `loss_oracle`: several critics, samples, discounts and rewards in a target."""

import math
from types import SimpleNamespace

import pytest
import torch
from loss_oracle import Draws, Oracle
from test_agent import SPACES, build, make_batch
from torch.overrides import TorchFunctionMode

from amago import config
from amago.agent import Agent, MultiTaskAgent, binary_filter, exp_filter

C, K, N_STEP, LENGTHS = 3, 2, 2, [6, 4, 1]
LOW, HIGH, BINS = -200.0, 500.0, 8  # as many bins as `build` gives
TINY = 1e-9
"""Where every sampled action is the stored one, the advantage is 0 but for rounding."""
FILTERS = {
    "binary": (lambda a: binary_filter(a, TINY), lambda a: float(a > TINY)),
    "exp": (exp_filter, lambda a: torch.exp(a).clamp(max=100.0)),
}


class Recorder(TorchFunctionMode):
    """Records what is drawn within the block: noise of actions (B, L, G, A) and indices of critics."""

    def __init__(self):
        super().__init__()
        self.noise, self.critics = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.randn_like, torch.bernoulli, torch.Tensor.exponential_):
            self.noise.append(out.detach().clone())
        elif func is torch.randint:
            self.critics.append(out.tolist())
        return out


@pytest.fixture
def _float64(monkeypatch):
    """Everything in float64, also what is kept in float32 at least."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def perturbed(agent):
    """Every parameter and statistic away from its start, the targets' away from the online networks'."""
    with torch.no_grad():
        for name, p in agent.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if "target" in name else 0.2))
        popart = agent.popart
        popart.mu.copy_(torch.randn_like(popart.mu))
        popart.nu.copy_(popart.mu**2 + 1.0 + torch.rand_like(popart.mu))
        popart.w.uniform_(0.5, 1.5)
        popart.b.normal_()
        popart._t.fill_(4.0)
    return agent.double().train()


def batch_of(kind):
    """Sequences of different lengths, with terminations; padding is filled with what would be seen."""
    batch = make_batch(kind)
    for x, mask in (
        (batch.obs["observation"], batch.mask), (batch.rl2s, batch.mask), (batch.rews, batch.transition_mask),
    ):  # fmt: skip
        x[~mask.expand_as(x)] = 7.0
    batch.dones[0, 2], batch.dones[1, 3], batch.dones[2, 0] = True, True, False
    for name in ("rl2s", "rews", "actions"):
        setattr(batch, name, getattr(batch, name).double())
    batch.obs = {k: v.double() for k, v in batch.obs.items()}
    return batch


def oracle_of(agent, kind, weight, **settings):
    params = dict(agent.named_parameters())
    popart = {k: getattr(agent.popart, "_t" if k == "t" else k).double().flatten().clone() for k in ("mu", "nu", "w", "b", "t")}
    twohot = isinstance(agent, MultiTaskAgent)
    return Oracle(
        params=params, target_params={k[len("target_") :]: v for k, v in params.items() if k.startswith("target_")},
        kind=kind, exact=kind == "discrete" and not twohot, gammas=[0.5, 0.75, 0.875], num_critics=C, reward_multiplier=10.0,
        weight=weight, popart=popart,
        bins=torch.linspace(-math.log1p(-LOW), math.log1p(HIGH), BINS) if twohot else None, **settings,
    )  # fmt: skip


def cases():
    """(agent, kind, online, offline, filter, options): several rewards in a target, targets over sequences, an entropy, layer norms."""
    several, traces = {"n_step": N_STEP}, {"targets": "tree_backup", "trace_lambda": 0.8}
    for kind in SPACES:
        entropy = {"entropy_target": -1.0 if kind == "continuous" else 0.5, "entropy_coeff": 1.5}
        yield Agent, kind, 1.0, 0.1, "binary", several
        yield Agent, kind, 0.0, 1.0, "exp", several
        yield Agent, kind, 0.7, 0.3, "binary", several | entropy
        yield MultiTaskAgent, kind, 0.0, 1.0, "binary", several
        yield MultiTaskAgent, kind, 0.7, 0.4, "exp", several
        yield MultiTaskAgent, kind, 0.7, 0.3, "binary", several | entropy
        for agent_type in (Agent, MultiTaskAgent):
            yield agent_type, kind, 0.7, 0.3, "exp", several | {"normalization": "layer"}
        if kind != "continuous":
            yield Agent, kind, 1.0, 0.3, "binary", traces
            yield Agent, kind, 0.7, 0.3, "binary", traces | entropy
            yield MultiTaskAgent, kind, 0.0, 0.3, "binary", traces


@pytest.mark.parametrize(
    ("agent_type", "kind", "online", "offline", "name", "options"),
    list(cases()),
    ids=lambda x: "+".join(x) if isinstance(x, dict) else None,
)
@pytest.mark.usefixtures("_float64")
def test_losses_and_gradients(agent_type, kind, online, offline, name, options):
    config.bind(
        {f"{critics}.normalization": options.get("normalization", "none") for critics in ("NCritics", "NCriticsTwoHot")}
    )
    options = {k: v for k, v in options.items() if k != "normalization"}
    torch.manual_seed(0)
    function, weight = FILTERS[name]
    config.bind({
        "Multigammas.discrete": [0.5, 0.75], "Multigammas.continuous": [0.5, 0.75], "FFTstepEncoder.normalize_inputs": False,
        "NCriticsTwoHot.min_return": LOW, "NCriticsTwoHot.max_return": HIGH,
    })  # fmt: skip
    agent = perturbed(build(
        kind, agent_type=agent_type, online_coeff=online, offline_coeff=offline, num_critics=C, num_critics_td=2, **options,
        gamma=0.875, fbc_filter_func=function, num_actions_for_value_in_actor_loss=K, num_actions_for_value_in_critic_loss=K,
    ))  # fmt: skip
    settings = {"n_step": 1} | {k: v for k, v in options.items() if "entropy" not in k}
    if agent.temperature is not None:
        assert agent.temperature.value.flatten().tolist() == pytest.approx([1.5, 1.5, 1.5])
        settings["temperature"] = [1.0, 2.0, 0.5]
        agent.temperature.log.copy_(torch.tensor(settings["temperature"]).log()[:, None])
    batch = batch_of(kind)
    oracle = oracle_of(agent, kind, weight, online=online, offline=offline, **settings)
    data = SimpleNamespace(
        states=agent.encode(batch), rews=batch.rews, dones=batch.dones, actions=batch.actions, lengths=LENGTHS,
    )  # fmt: skip
    with Recorder() as drawn:
        loss, got = agent(batch), agent.update_info
    if oracle.exact:
        assert drawn.noise == []
        drawn.noise = 2 * [torch.zeros(3, 6, 3, 4)]
    k = len(drawn.noise) // 2
    assert k == (1 if oracle.exact else K)
    [critics] = drawn.critics

    want = oracle.losses(data, Draws(drawn.noise[:k]), Draws(drawn.noise[k:], critics))
    for part, expected in zip(("Actor Loss", "Critic Loss"), want):
        torch.testing.assert_close(got[part], expected, rtol=1e-6, atol=1e-9, msg=lambda m, part=part: f"{part}: {m}")
        assert expected.abs() > 1e-3

    params = {k: p for k, p in agent.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    wanted = torch.autograd.grad(want[0] + 10.0 * want[1], list(params.values()), allow_unused=True)
    for param, a, b in zip(params, found, wanted):
        assert a is not None, param
        assert b is not None, param
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()), msg=lambda m, p=param: f"{p}: {m}")
        assert b.abs().max() > 0, param
    for stat in ("mu", "nu", "w", "b"):
        torch.testing.assert_close(getattr(agent.popart, stat).flatten(), oracle.popart[stat], rtol=1e-6, atol=1e-9)
