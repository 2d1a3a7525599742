"""What an update asks of the host and of the device, counted exactly on a simulated device."""

import copy
import sys
from contextlib import contextmanager

import pytest
import tiny
import torch
from gpu.devices import CUDA, capture, counted
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


def updates(e, batches, device):
    """The metrics of an update with each batch; every fifth is logged."""
    torch.manual_seed(3)
    e.policy_aclr.train()
    return [e.train_step(b.to(e.DEVICE), n % 5 == 4) for n, b in enumerate(batches)]


@simulated
@pytest.mark.filterwarnings("default")  # the compiler warns
@pytest.mark.parametrize(
    ("agent_type", "make_env", "traj", "fields"),
    [
        *((*pair, {}) for pair in PAIRS), (*AGENTS[0], {"ema_decay": 0.9}), (*AGENTS[0], {"mixed_precision": "fp16"}),
        (*AGENTS[0], {"mixed_precision": "bf16"}), (*AGENTS[0], {"actor_learning_rate": 1e-3}), (*PAIRS[3], {"compile": True}),
    ],
)  # fmt: skip
def test_updates_by_graphs_equal_ordinary_ones(agent_type, make_env, traj, fields, tmp_path, device, monkeypatch, caplog):
    """Two shapes, each captured after three updates: nothing in them waits, moves to other memory, or is decided by the host; the ninth is
    skipped, and learning rates rise all the time."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager"))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    replays = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted(torch.cuda.CUDAGraph.replay, replays))
    ordinary, graphs = (
        tiny.started(
            tmp_path / str(on),
            make_env,
            traj,
            agent_type=agent_type,
            cuda_graphs=on,
            lr_warmup_steps=50,
            max_seq_len=8,
            **fields,
        )
        for on in (False, True)
    )
    for group in ordinary.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)  # in the precision of a graph
    batches = [batch_of(length, ordinary) for length in (8, 4, 8, 4, 8, 8, 4, 8, 8, 4, 8, 8, 4, 8)]
    batches[8].rews[:] = torch.nan
    expected, found = ([dict(m) for m in updates(e, map(copy.deepcopy, batches), device)] for e in (ordinary, graphs))
    assert len(replays) == 6
    assert "failed" not in caplog.text
    assert not tiny.differing(*map(tiny.weights, (ordinary, graphs)))
    made = 12 if "fp16" in fields.values() else 13  # the first scale
    assert ordinary.grad_update_counter == graphs.grad_update_counter == made
    for wanted, metrics in zip(expected, found):
        assert wanted.keys() == metrics.keys()
        for name in wanted:
            torch.testing.assert_close(float(metrics[name]), float(wanted[name]), equal_nan=True, rtol=1e-6, atol=0.0)


@simulated
def test_a_checkpoint_is_loaded_between_replays(tmp_path, device, monkeypatch):
    """Weights, moments and average are put into other memory than a graph knows."""
    monkeypatch.setattr(torch.cuda, "graph", capture)
    e = tiny.started(tmp_path, tiny.tmaze, "transformer", cuda_graphs=True, ema_decay=0.9, max_seq_len=8)
    batches = [batch_of(8, e) for _ in range(5)]
    updates(e, batches, device)
    e.save_checkpoint()
    updates(e, batches, device)
    expected = tiny.weights(e)
    e.load_checkpoint(e.epoch)
    updates(e, batches, device)
    assert not tiny.differing(expected, tiny.weights(e))


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


def batch_of(length, e):
    """Three sequences of random numbers, for the spaces of an experiment."""
    times, done = torch.arange(length + 1)[:, None], torch.zeros(length, 1, dtype=torch.bool)
    width = e.policy.rl2_space.shape[0]
    rews, actions = torch.randn(length, 1), torch.eye(width - 1)[torch.randint(width - 1, (length,))]
    obs = {key: torch.randn(length + 1, *space.shape) for key, space in e.policy.obs_space.spaces.items()}
    rl2s = torch.randn(length + 1, width)
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
        e.train_step(batch_of(length, e).to(e.DEVICE), log_step=False)
    assert e.grad_update_counter == 9
    assert len(graphs) == 2
    assert not counters["graph_break"]
    torch._dynamo.reset()
