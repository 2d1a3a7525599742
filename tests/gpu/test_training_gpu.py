"""Experiments, their checkpoints and policies on each device."""

import socket

import numpy as np
import pytest
import tiny
import torch
from gpu.devices import CUDA, real_device
from test_learning import success

import amago
from amago.loading import Batch
from amago.policy.export import StepModel

MODELS = ["gru", "transformer"]
KEEP = {"ckpt_interval": 1, "always_save_latest": True}


def finite(e):
    return all(torch.isfinite(v).all() for v in tiny.weights(e).values() if v.is_floating_point())


@pytest.mark.parametrize("env_mode", ["sync", "async"])
@pytest.mark.parametrize("traj", MODELS)
def test_collecting_and_training(traj, env_mode, tmp_path, device):
    e = tiny.started(tmp_path, tiny.pendulum, traj, env_mode=env_mode, epochs=2, val_interval=1, val_timesteps_per_epoch=25)
    before = tiny.weights(e)
    e.learn()
    assert e.DEVICE.type == device.type
    assert {p.device.type for p in e.policy.parameters()} == {device.type}
    assert tiny.differing(before, tiny.weights(e))
    assert finite(e)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("traj", MODELS)
def test_mixed_precision(traj, precision, tmp_path, device):
    if (device.type, precision) == ("cpu", "fp16"):
        pytest.skip("float16 has a scaler on a GPU alone")
    e = tiny.learned(tmp_path, traj=traj, mixed_precision=precision, epochs=2)
    assert (e.accelerator.scaler is not None) == (precision == "fp16")
    assert {p.dtype for p in e.policy.parameters()} == {torch.float32}
    assert finite(e)


class Poisoned(amago.Experiment):
    """The loss of every update is infinite from the tenth on."""

    def what_an_update_moves(self):
        """Parameters, those of target networks among them; the average of the weights; the learning rate."""
        with self.acting_weights():
            average = [p.detach().clone() for p in self.policy.trainable_params]
        return [p.detach().clone() for p in self.policy.parameters()], average, self.lr_schedule.get_last_lr()

    def compute_loss(self, batch, log_step):
        self.losses = getattr(self, "losses", 0) + 1
        if self.losses == 12:
            self.kept = self.what_an_update_moves()
        metrics = super().compute_loss(batch, log_step)
        if self.losses > 10:
            metrics["Actor Loss"] = metrics["Actor Loss"] * float("inf")
        return metrics


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_skipped_updates_are_counted(precision, tmp_path, device):
    """Nothing moves in an update without a finite gradient, and twenty in a row end the run, when the next one is ready."""
    options = {"mixed_precision": precision, "experiment_type": Poisoned, "ema_decay": 0.5}
    e = tiny.started(tmp_path, epochs=1, train_batches_per_epoch=40, **options)
    with pytest.raises(RuntimeError, match="20 steps in a row"):
        e.learn()
    assert e.losses == 31
    for before, after in zip(e.kept[:2], e.what_an_update_moves()[:2], strict=True):
        assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    assert e.kept[2] == e.what_an_update_moves()[2]
    assert e.grad_update_counter == 10 or (
        precision == "fp16" and 5 <= e.grad_update_counter < 10
    )  # its first scale is too large
    assert finite(e)


@pytest.mark.parametrize(
    ("first", "second"),
    [("cpu", "cpu"), pytest.param("cpu", "cuda", marks=CUDA.marks), pytest.param("cuda", "cpu", marks=CUDA.marks)],
)
def test_resuming_on_another_device(first, second, tmp_path, use):
    use(first)
    e = tiny.learned(tmp_path, traj="transformer", **KEEP)
    saved = {k: v.cpu() for k, v in tiny.weights(e).items()}
    moments = [s["exp_avg"].cpu() for s in e.optimizer.state_dict()["state"].values()]
    e.close()
    use(second)
    e = tiny.started(tmp_path, traj="transformer", resume="auto", epochs=2, **KEEP)
    assert (e.epoch, e.DEVICE.type) == (1, second)
    assert not tiny.differing(saved, {k: v.cpu() for k, v in tiny.weights(e).items()})
    restored = [s["exp_avg"] for s in e.optimizer.state_dict()["state"].values()]
    assert all(a.device.type == second and a.cpu().equal(b) for a, b in zip(restored, moments, strict=True))
    e.learn()
    assert finite(e)


@pytest.mark.parametrize("traj", MODELS)
def test_a_policy_on_another_device_acts_alike(traj, tmp_path, device):
    e = tiny.learned(tmp_path, tiny.pendulum, traj, **KEEP)
    e.close()
    rng = np.random.default_rng(0)
    policies = [amago.load_policy(e.run_dir, device=d, sample=False) for d in ("cpu", device)]
    for _ in range(20):
        obs = {k: rng.normal(size=s.shape).astype(s.dtype) for k, s in policies[0].agent.obs_space.spaces.items()}
        actions = [policy.act(obs, reward=0.5) for policy in policies]
        np.testing.assert_allclose(actions[0], actions[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("traj", MODELS)
def test_exporting_an_agent_of_another_device(traj, tmp_path, device):
    e = tiny.learned(tmp_path, tiny.pendulum, traj)
    here, there = StepModel(e.policy.to(device)), StepModel(e.policy.to("cpu"))
    args = here.example(2)
    for a, b in zip(here(*args), there(*args)):
        torch.testing.assert_close(a, b)


@real_device("NCCL")
def test_one_process_of_several(tmp_path, device, monkeypatch):
    """Distributed data parallel with a world of one process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    places = {
        "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    try:
        e = tiny.learned(tmp_path, traj="transformer", **KEEP)
        assert torch.distributed.is_initialized()
        assert finite(e)
        assert (tmp_path / "run" / "ckpts" / "latest" / "policy.pt").is_file()
    finally:
        tiny.close_all()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_batches_in_page_locked_memory(device):
    steps = {"rews": 1, "dones": 1, "actions": 2}
    batch = Batch(
        obs={"x": torch.randn(2, 4, 3)},
        rl2s=torch.randn(2, 4, 3),
        time_idxs=torch.zeros(2, 4, 1, dtype=torch.int64),
        mask=torch.ones(2, 4, 1),
        **{name: torch.zeros(2, 3, width) for name, width in steps.items()},
    )
    before = batch.obs["x"].clone()
    pinned = batch.pin_memory()
    tensors = [pinned.obs["x"], *(getattr(pinned, name) for name in ("rl2s", "rews", "dones", "actions", "time_idxs", "mask"))]
    assert all(x.is_pinned() for x in tensors)
    moved = pinned.to(device, non_blocking=True)
    torch.cuda.synchronize()
    assert moved.obs["x"].cpu().equal(before)


@real_device("numerics of its own")
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_learning(device, tmp_path):
    """A maze that only memory solves, as in `tests/test_learning.py`."""
    assert success("gru", tmp_path, epochs=40) >= 0.95
