"""What an update asks of the host and of the device, counted exactly on a simulated device."""

import copy
from contextlib import contextmanager

import pytest
import tiny
import torch
from gpu.devices import CUDA, SIMULATED, count_replays, real_device
from run.test_compiled_parity import gradients
from torch._dynamo.utils import counters

import amago
from amago import config
from amago.agent import MultiTaskAgent, exp_filter
from amago.loading import RLData, collate

AGENTS = [(amago.Agent, tiny.tmaze, "transformer"), (amago.Agent, tiny.pendulum, "ff"), (MultiTaskAgent, tiny.tmaze, "gru")]
MODELS = ["ff", "transformer", "gru", "mingru", "mamba"]
PAIRS = [(kind, make, model) for kind, make in ((amago.Agent, tiny.pendulum), (MultiTaskAgent, tiny.tmaze)) for model in MODELS]
simulated = pytest.mark.skipif(not SIMULATED, reason="counts are those of a simulated device")

pytestmark = pytest.mark.parametrize("device", [CUDA], indirect=True)


def prepared(root, agent_type, make_env, traj, **fields):
    """A run after six updates, three of them by the batch that is returned, in which the scale of fp16 settles."""
    options = {"log_interval": 0, "lr_warmup_steps": 1, "train_batches_per_epoch": 3, "train_timesteps_per_epoch": 24}
    e = tiny.learned(root, make_env, traj, agent_type=agent_type, **options, **fields)
    (batch,) = e.batches.take(1)
    batch = batch.to(e.DEVICE)
    for _ in range(3):
        e.train_step(batch, False)
    return e, batch


@contextmanager
def no_wait():
    """Fail where the host waits for the device."""
    if SIMULATED:
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
    replays = count_replays(monkeypatch)
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
    assert_same_weights(*map(tiny.weights, (ordinary, graphs)))
    made = 12 if "fp16" in fields.values() else 13  # the first scale
    assert ordinary.grad_update_counter == graphs.grad_update_counter == made
    for wanted, metrics in zip(expected, found):
        assert wanted.keys() == metrics.keys()
        for name in wanted:
            torch.testing.assert_close(
                float(metrics[name]), float(wanted[name]), equal_nan=True, rtol=1e-6 if SIMULATED else 0.02, atol=0.0
            )


def assert_same_weights(expected, found):
    """To the bit on a simulated device. On a GPU sums have another order in each update, and 13 of them move weights by 1e-3 at most."""
    if SIMULATED:
        assert not tiny.differing(expected, found)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0.0, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


class Asks(amago.Experiment):
    """Its loss depends on a number that the host reads."""

    def compute_loss(self, batch, log_step):
        metrics = super().compute_loss(batch, log_step)
        return metrics | {"Actor Loss": metrics["Actor Loss"] / (1.0 + abs(metrics["Critic Loss"].item()))}


@pytest.mark.parametrize(("agent_type", "make_env", "traj"), AGENTS)
def test_a_run_whose_capture_fails_goes_on_as_without(agent_type, make_env, traj, tmp_path, device, monkeypatch, caplog):
    replays, found = count_replays(monkeypatch), []
    fields = {"agent_type": agent_type, "experiment_type": Asks, "max_seq_len": 8}
    ordinary, graphs = (tiny.started(tmp_path / str(on), make_env, traj, cuda_graphs=on, **fields) for on in (False, True))
    for group in ordinary.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)  # in the precision of a graph
    batches = [batch_of(8, ordinary) for _ in range(9)]
    for e in (ordinary, graphs):
        metrics = updates(e, map(copy.deepcopy, batches), device)
        found.append((float(metrics[-1]["Loss"]), e.grad_update_counter))
    assert not replays
    assert caplog.text.count("updates are not replayed as CUDA graphs, since a capture has failed") == 1
    assert SIMULATED or torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_weights(*map(tiny.weights, (ordinary, graphs)))
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_a_checkpoint_is_loaded_between_replays(tmp_path, device, monkeypatch):
    """Weights, moments and average are put into other memory than a graph knows."""
    count_replays(monkeypatch)
    e = tiny.started(tmp_path, tiny.tmaze, "transformer", cuda_graphs=True, ema_decay=0.9, max_seq_len=8)
    batches = [batch_of(8, e) for _ in range(5)]
    updates(e, batches, device)
    e.save_checkpoint()
    updates(e, batches, device)
    expected = tiny.weights(e)
    e.load_checkpoint(e.epoch)
    updates(e, batches, device)
    assert_same_weights(expected, tiny.weights(e))


@real_device("kernels of the compiler")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("agent_type", "make_env", "traj", "fields"), [*((*pair, {}) for pair in PAIRS), (*AGENTS[0], {"mixed_precision": "bf16"})]
)
def test_a_compiled_loss_and_its_gradients_equal_ordinary_ones(
    agent_type, make_env, traj, fields, tmp_path, device, monkeypatch, caplog
):
    config.bind({"MultiTaskAgent.fbc_filter_func": exp_filter})
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        eager, compiled = (
            tiny.started(tmp_path / str(on), make_env, traj, agent_type=agent_type, compile=on, max_seq_len=16, **fields)
            for on in (False, True)
        )
        batch = batch_of(16, eager).to(device)
        (loss, expected), (same, found) = gradients(eager, batch), gradients(compiled, batch)
        assert "which has failed" not in caplog.text
        near = 0.03 if fields else 1e-4
        torch.testing.assert_close(same, loss, rtol=near, atol=0.0)
        largest = float(max(g.abs().max() for g in expected))
        for x, y in zip(expected, found, strict=True):
            torch.testing.assert_close(y, x, rtol=0.0, atol=near * largest)

        replays = count_replays(monkeypatch)
        graphs = tiny.started(
            tmp_path / "graphs", make_env, traj, agent_type=agent_type, compile=True, cuda_graphs=True, max_seq_len=16, **fields
        )
        gradients(graphs, batch)  # moves statistics of inputs, as those of the other two have been
        batches = [batch_of(16, eager) for _ in range(9)]
        updates(eager, batches, device)
        updates(graphs, batches, device)
        assert len(replays) == 5
        assert "failed" not in caplog.text
        weights = [torch.cat([w.flatten() for w in tiny.weights(e).values()]) for e in (compiled, eager, graphs)]
        moved, apart = ((weights[1] - w).norm() for w in (weights[0], weights[2]))
        assert apart < (0.3 if fields else 0.05) * moved
    torch._dynamo.reset()


def test_older_compilers_have_fewer_options(tmp_path, device, monkeypatch):
    known = [name for name in torch._inductor.list_options() if "combo" not in name]
    monkeypatch.setattr(torch._inductor, "list_options", lambda: known)
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    tiny.started(tmp_path, compile=True)
    assert given == [{"options": {}}]


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
