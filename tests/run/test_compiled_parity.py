"""Updates by PyTorch's compiler, on a CPU, against uncompiled ones. Each test compiles a whole loss, which takes most of its time."""

import shutil

import pytest
import tiny
import torch
from rank_launch import finish
from run.test_checkpoint import cliff, state
from torch._dynamo.utils import counters

from amago.agent import MultiTaskAgent, exp_filter

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the compiler
    pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++"),
    pytest.mark.timeout(1200),  # with cold caches those of one test took 160 CPU seconds
]


@pytest.fixture
def same_random_numbers():
    """Compiled code draws the random numbers of uncompiled code."""
    with torch._inductor.config.patch(fallback_random=True):
        yield


@pytest.fixture(autouse=True)
def compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    assert not counters["graph_break"]
    torch._dynamo.reset()


def gradients(e, batch):
    """Of each trained parameter, for the loss of one batch."""
    e.policy_aclr.train()
    torch.manual_seed(0)
    metrics = e.compute_loss(batch, log_step=False)
    loss = metrics["Actor Loss"] + e.policy.critic_loss_weight * metrics["Critic Loss"] + metrics["Auxiliary Loss"]
    found = torch.autograd.grad(loss, e.policy.trainable_params, allow_unused=True)
    return loss.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(e.policy.trainable_params, found)]


AGENT = {
    "make_env": cliff, "train_timesteps_per_epoch": 40, "agent_type": MultiTaskAgent, "traj": "transformer", "log_interval": 0
}  # fmt: skip
"""One for both tests, so that the second finds code that is compiled; the two ranks below have an `Agent`."""


@pytest.fixture
def smooth_filter():
    tiny.config.bind({"MultiTaskAgent.fbc_filter_func": exp_filter})  # rounding turns the binary one for an action now and then


def test_fifty_updates_then_the_loss_and_every_gradient(tmp_path, same_random_numbers, smooth_filter):
    fields = AGENT | {"lr_warmup_steps": 1, "train_batches_per_epoch": 50}
    eager, compiled = (tiny.learned(tmp_path / f"compiled {on}", compile=on, **fields) for on in (False, True))
    assert counters["stats"]["unique_graphs"] == 1
    before = tiny.started(tmp_path / "start", **AGENT)
    start, a, b = ([p.detach() for p in e.policy.trainable_params] for e in (before, eager, compiled))
    moved, apart = (torch.cat([(x - y).flatten() for x, y in zip(a, other)]).norm() for other in (start, b))
    assert 0 < apart < 0.05 * moved

    compiled.policy.load_state_dict(eager.policy.state_dict())
    (batch,) = eager.batches.take(1)
    (loss, expected), (same, found) = gradients(eager, batch), gradients(compiled, batch)
    torch.testing.assert_close(same, loss, rtol=1e-5, atol=0.0)
    largest = max(g.abs().max() for g in expected)  # others may be zero but for rounding
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-3, atol=1e-5 * float(largest))


def test_a_resumed_run_goes_on_to_the_bit(tmp_path, same_random_numbers, smooth_filter):
    fields = AGENT | {"compile": True, "epochs": 4, "ckpt_interval": 1, "force_reset_train_envs_every": 1}
    straight = state(tiny.learned(tmp_path / "straight", **fields))
    tiny.learned(tmp_path / "halved", callbacks=[tiny.StopAfter(2)], **fields).close()
    torch._dynamo.reset()
    compiled = counters["stats"]["unique_graphs"]
    e = tiny.learned(tmp_path / "halved", resume="auto", **fields)
    assert counters["stats"]["unique_graphs"] > compiled > 0
    assert not tiny.differing(straight, state(e))


def test_two_ranks_with_the_compiler_equal_two_without_which_send_three_sums(tmp_path):
    finish("compiled", tmp_path)
    ranks = [torch.load(tmp_path / f"compiled-{rank}.pt", weights_only=True) for rank in (0, 1)]
    for on in (False, True):
        assert not tiny.differing(ranks[0][on]["weights"], ranks[1][on]["weights"])
    for rank in ranks:
        assert (rank[True]["graphs"], rank[True]["breaks"]) == (1, 0)
        assert tiny.differing(rank[True]["weights"], rank[False]["weights"]), "by rounding: the compiler was used"
        torch.testing.assert_close(rank[True]["losses"], rank[False]["losses"], rtol=1e-5, atol=0.0)
        for name, weight in rank[False]["weights"].items():
            torch.testing.assert_close(
                rank[True]["weights"][name], weight, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert len(ranks[0][False]["sent"]) == 3, "of the inputs, of the targets, and of the valid steps of all losses"
