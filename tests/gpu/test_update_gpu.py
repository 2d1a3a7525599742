"""What an update asks of the host and of the device, counted exactly on a simulated device."""

import sys
from contextlib import contextmanager

import pytest
import tiny
import torch
from gpu.devices import CUDA
from torch._dynamo.utils import counters

import amago
from amago.agent import MultiTaskAgent
from amago.loading import RLData, collate

AGENTS = [(amago.Agent, tiny.tmaze, "transformer"), (amago.Agent, tiny.pendulum, "ff"), (MultiTaskAgent, tiny.tmaze, "gru")]
MODELS = ["ff", "transformer", "gru", "mingru", "mamba"]
PAIRS = [(kind, make, model) for kind, make in ((amago.Agent, tiny.pendulum), (MultiTaskAgent, tiny.tmaze)) for model in MODELS]
simulated = pytest.mark.skipif("simcuda" not in sys.modules, reason="counts are those of a simulated device")

pytestmark = pytest.mark.parametrize("device", [CUDA], indirect=True)


def prepared(root, agent_type, make_env, traj, **fields):
    """A run after three updates, and a batch of it on the device."""
    options = {"log_interval": 0, "lr_warmup_steps": 1, "train_batches_per_epoch": 3, "train_timesteps_per_epoch": 24}
    e = tiny.learned(root, make_env, traj, agent_type=agent_type, **options, **fields)
    (batch,) = e.batches.take(1)
    return e, batch.to(e.DEVICE)


@contextmanager
def no_wait():
    """Fail where the host waits for the device."""
    if "simcuda" in sys.modules:
        from simcuda import Recorder, model

        with Recorder() as recorder:
            yield
        assert model.syncs(recorder.events) == []
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(("agent_type", "make_env", "traj"), AGENTS)
def test_an_update_without_a_log_waits_for_nothing(agent_type, make_env, traj, precision, tmp_path, device):
    if precision != "no" and traj != "transformer":
        pytest.skip("once is enough")
    e, batch = prepared(tmp_path, agent_type, make_env, traj, mixed_precision=precision, ema_decay=0.9)
    before = e.grad_update_counter
    with no_wait():
        e.train_step(batch, False)
        e.train_step(batch, False)
    assert e.grad_update_counter == before + 2


@simulated
@pytest.mark.parametrize(("agent_type", "make_env", "traj"), [*PAIRS, AGENTS[0]])
def test_replayed_updates_equal_eager_ones(agent_type, make_env, traj, tmp_path, device):
    """An update as one CUDA graph: nothing in it waits, moves to other memory, or is decided by the host."""
    (eager, batch), (replayed, same) = (prepared(tmp_path / n, agent_type, make_env, traj) for n in "ab")
    assert not tiny.differing(*map(tiny.weights, (eager, replayed)))
    for e in (eager, replayed):
        group = e.optimizer.param_groups[0]
        group["lr"] = torch.tensor(group["lr"], device=device)
    state = [*replayed.policy.state_dict().values()]
    state += [x for s in replayed.optimizer.state_dict()["state"].values() for x in s.values()]
    kept, graph = [x.clone() for x in state], torch.cuda.CUDAGraph()
    torch.manual_seed(3)
    assert replayed.grad_update_counter
    with torch.cuda.graph(graph):
        replayed.train_step(same, False)
    for x, before in zip(state, kept, strict=True):  # a simulated device computes while it captures
        x.copy_(before)
    torch.manual_seed(3)
    for _ in range(6):
        graph.replay()
    torch.manual_seed(3)
    for _ in range(6):
        eager.train_step(batch, False)
    assert not tiny.differing(*map(tiny.weights, (eager, replayed)))


@simulated
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_one_copy_without_a_wait(workers, tmp_path, device):
    """From page-locked memory, all fields at once, with the values that the dataset has drawn."""
    from simcuda import Recorder, model

    e = tiny.learned(tmp_path, make_env=tiny.cartpole, dloader_workers=workers, train_timesteps_per_epoch=62)
    loader = e.train_dloader
    first = loader.next_batch
    with Recorder() as recorder:
        batches = list(loader.batches(3))
    found = model.summary(recorder.events)
    assert (found["h2d_n"], found["pageable"], found["syncs"], found["d2h"]) == (3, 0, 0, 0)
    for number, batch in enumerate(batches, first):
        drawn = loader.draw(number)
        pairs = [(getattr(drawn, k), getattr(batch, k)) for k in ("rl2s", "rews", "dones", "actions", "time_idxs", "mask")]
        for a, b in [*pairs, (drawn.obs["observation"], batch.obs["observation"])]:
            assert b.is_cuda
            assert b.cpu().equal(a)


def batch_of(length):
    """Three sequences of random numbers, for the spaces of `tiny.cartpole`."""
    times, done = torch.arange(length + 1)[:, None], torch.zeros(length, 1, dtype=torch.bool)
    rews, actions = torch.randn(length, 1), torch.eye(2)[torch.randint(2, (length,))]
    obs, rl2s = {"observation": torch.randn(length + 1, 4)}, torch.randn(length + 1, 3)
    return collate([RLData(obs=obs, rl2s=rl2s, rews=rews, dones=done, actions=actions, time_idxs=times)] * 3)


@simulated
@pytest.mark.filterwarnings("default")  # the compiler warns
@pytest.mark.parametrize("agent_type", [amago.Agent, MultiTaskAgent])
@pytest.mark.parametrize("traj", ["ff", "transformer", "mingru", "mamba"])
def test_a_loss_is_compiled_whole_and_twice(agent_type, traj, tmp_path, device, monkeypatch):
    """Nine batches of seven lengths, which are padded to four: the first is compiled as it is, and the second for any length."""
    torch._dynamo.reset()
    counters.clear()
    compile, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend=backend))
    e = tiny.started(tmp_path, tiny.cartpole, traj, agent_type=agent_type, compile=True, max_seq_len=40)
    e.policy_aclr.train()
    for length in (40, 4, 9, 18, 33, 18, 40, 12, 5):
        e.train_step(batch_of(length).to(e.DEVICE), log_step=False)
    assert e.grad_update_counter == 9
    assert len(graphs) == 2
    assert not counters["graph_break"]
    torch._dynamo.reset()
