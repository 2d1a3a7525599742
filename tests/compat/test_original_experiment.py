"""`Experiment` as code for the original system uses it: parts of ``start()``, environments, hooks, loops and checkpoints of its own."""

import os

import pytest
import tiny
import torch
from messages import naming
from tiny import EPISODE, experiment, learned, started

import amago
from amago import cli_utils
from amago.envs import AMAGOEnv
from amago.envs.builtin import TMazePassive
from amago.run.rundir import RunExistsError
from amago.utils import call_async_env


class Maze(AMAGOEnv):
    def __init__(self):
        super().__init__(TMazePassive(tiny.CORRIDOR), env_name="TMaze")

    def lose_the_line(self):
        raise ConnectionError("the server is gone")


def test_accelerator_and_device_exist_before_the_start_and_follow_fields_that_change(tmp_path):
    e, other = experiment(tmp_path), experiment(tmp_path, name="other")
    assert torch.device("cpu") == e.DEVICE
    made = e.accelerator
    assert (made.num_processes, made.mixed_precision) == (1, "no")
    e.parallel_actors, e.env_mode, e.verbose, e.epoch = 3, "sync", False, 4
    e.start()
    assert e.accelerator is made
    assert (e.train_envs.num_envs, e.epoch) == (3, 4)
    other.mixed_precision, other.batches_per_update = "bf16", 2
    other.start()
    assert (other.accelerator.mixed_precision, other.accelerator.gradient_accumulation_steps) == ("bf16", 2)


@pytest.mark.parametrize("model_first", [False, True])
def test_the_parts_of_start_are_called_one_by_one(tmp_path, model_first):
    e = experiment(tmp_path, ckpt_interval=1, always_save_latest=True)
    assert e.init_dsets() is e.dataset
    text = e.init_envs()
    assert "2 actors" in text
    for part in (e.init_model, e.init_dloaders) if model_first else (e.init_dloaders, e.init_model):
        part()
    assert not (e.run_dir / "policy.json").exists()
    e.init_checkpoints()
    assert isinstance(e.ckpt_dir, str)
    assert os.path.isdir(os.path.join(e.ckpt_dir, "training_states"))
    assert e.ckpt_dir + "/latest" == str(e.ckpt_dir / "latest") == f"{e.run_dir}/ckpts/latest"
    e.init_logger()
    e.summary(env_summary=text)
    e.learn()
    assert (e.epoch, e.grad_update_counter) == (1, 2)
    assert {r["section"] for r in tiny.rows(e.run_dir)} >= {"train", "rollout", "buffer"}
    e.close()
    again = started(tmp_path, resume="auto")
    assert again.epoch == 1


def test_zero_switches_intervals_off(tmp_path):
    class Strict(amago.Experiment):
        def evaluate_val(self):
            raise AssertionError("val_interval=0")

    fields = {"val_interval": 0, "ckpt_interval": 0, "force_reset_train_envs_every": 0, "log_interval": 0}
    e = learned(tmp_path, experiment_type=Strict, epochs=2, **fields)
    assert e.learner.grad_steps == 4
    assert not list((e.run_dir / "ckpts" / "training_states").iterdir())


@pytest.mark.parametrize("field", ["sample_actions_val", "sample_actions"])
def test_evaluation_by_the_mode_has_two_names(tmp_path, field):
    e = started(tmp_path, tiny.cartpole)
    setattr(e, field, False)  # after the start
    assert e.evaluate_test(tiny.cartpole, 31) == e.evaluate_test(tiny.cartpole, 31)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_environments_answer_right_after_init_envs(tmp_path, mode):
    e = experiment(tmp_path, Maze, env_mode=mode, env_workers=1 if mode == "async" else None)
    e.init_dsets()
    e.init_envs()
    assert call_async_env(e.val_envs, "env_name") == call_async_env(e.train_envs, "env_name") == ["TMaze"] * 2
    kind = ConnectionError if mode == "sync" else amago.envs.ActorError
    with pytest.raises(kind, match="the server is gone"):
        call_async_env(e.val_envs, "lose_the_line")
    with pytest.raises(AttributeError, match=naming("'nothing'", "Maze")):
        call_async_env(e.val_envs, "nothing")
    assert hasattr(e.val_envs, "envs") is (mode == "sync")


class Stepwise(amago.Agent):
    """Expects a dimension of one timestep, as the original calls it."""

    def get_actions(self, obs, rl2s, time_idxs, hidden_state=None, sample=True):
        n, one, _ = rl2s.shape
        assert (one, obs["observation"].shape[:2], time_idxs.shape) == (1, (n, 1), (n, 1, 1))
        _, hidden_state = super().get_actions(obs, rl2s, time_idxs, hidden_state, sample)
        return torch.full((n, 1, 1), 1, dtype=torch.uint8), hidden_state


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_overridden_get_actions_acts_in_rollouts(tmp_path, mode):
    how = {"env_mode": mode, "env_workers": 1 if mode == "async" else None, "exploration_wrapper_type": None}
    e = learned(tmp_path, traj="gru", agent_type=Stepwise, parallel_actors=4, **how)
    batch = next(iter(e.train_dloader))
    assert (batch.actions.argmax(-1)[batch.transition_mask.squeeze(-1)] == 1).all()
    assert e.learner.grad_steps == 2


def test_the_order_of_an_epoch(tmp_path):
    order = []

    class Ordered(amago.Experiment):
        def log(self, metrics_dict, key):
            order.append(f"log {key}")
            super().log(metrics_dict, key)

        def train_step(self, batch, log_step):
            order.append(f"train_step {log_step}")
            out = super().train_step(batch, log_step)
            assert out["Loss"].isfinite()
            assert not any(torch.is_tensor(x) and x.requires_grad for x in out.values())
            assert out["Learning Rate"] > 0
            assert ("Actor Grad Norm" in out) == log_step
            return out

    for name in (
        "read_latest_policy", "evaluate_val", "collect_new_training_data", "init_dloaders", "save_checkpoint", "write_latest_policy",
    ):  # fmt: skip

        def told(self, *args, _name=name, **kwargs):
            order.append(f"{_name} {self.epoch}")
            return getattr(super(Ordered, self), _name)(*args, **kwargs)

        setattr(Ordered, name, told)
    fields = {"always_load_latest": True, "always_save_latest": True, "val_interval": 1, "ckpt_interval": 1, "log_interval": 2}
    e = started(tmp_path, experiment_type=Ordered, epochs=2, train_batches_per_epoch=3, **fields)
    on_end = e.dataset.on_end_of_collection
    e.dataset.on_end_of_collection = lambda *args, **kwargs: order.append("on_end_of_collection") or on_end(*args, **kwargs)
    order.clear()
    e.learn()
    epoch = [
        "read_latest_policy N", "evaluate_val N", "log val", "collect_new_training_data N", "log rollout", "on_end_of_collection",
        "log dataset", "init_dloaders N", "train_step True", "train_step False", "train_step True", "log train-update",
        "save_checkpoint N+1", "write_latest_policy N+1",
    ]  # fmt: skip
    assert order == [line.replace("N+1", str(n + 1)).replace("N", str(n)) for n in range(2) for line in epoch]
    assert e.epoch == 2
    assert (e.run_dir / "ckpts" / "policy_weights" / "policy_epoch_1.pt").exists()


class Accumulating(amago.Experiment):
    """Replaces the step as a whole."""

    def train_step(self, batch, log_step):
        with self.accelerator.accumulate(self.policy_aclr):
            self.optimizer.zero_grad()
            loss = self.policy_aclr(batch, log_step=log_step)
            metrics = dict(self.policy.update_info)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.policy_aclr.parameters(), self.grad_clip)
                self.policy.soft_sync_targets()
                self.grad_update_counter += 1
                metrics |= self.policy.get_grad_norms()
            self.optimizer.step()
            self.lr_schedule.step()
        return {"Loss": loss, "Learning Rate": self.lr_schedule.get_last_lr()[0], **metrics}


def test_train_step_is_replaced_as_a_whole(tmp_path):
    e = started(tmp_path, experiment_type=Accumulating, ckpt_interval=1)
    before = tiny.weights(e)
    e.learn()
    assert e.grad_update_counter == e.x_axis_metrics()["gradient_steps"] == 2
    assert tiny.differing(before, tiny.weights(e))
    e.close()
    again = started(tmp_path, experiment_type=Accumulating, resume="auto")
    assert again.grad_update_counter == 2


def test_ones_own_iterable_is_trained_on_to_its_end(tmp_path):
    class Five(amago.Experiment):
        def init_dloaders(self):
            batches = super().init_dloaders()
            if self.dataset.ready_for_training:
                self.train_dloader = [batches.draw(n) for n in range(5)]

    e = learned(tmp_path, experiment_type=Five, train_batches_per_epoch=3)
    assert e.learner.grad_steps == 5


def test_nothing_is_written_over_an_earlier_run_before_it_is_loaded(tmp_path):
    first = learned(tmp_path, ckpt_interval=1, always_save_latest=True)
    first.close()

    def contents():
        return {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"}

    before = contents()
    e = started(tmp_path)
    _, (returns, _) = e.interact(e.val_envs, EPISODE)
    assert sum(len(r.data["TMaze"]) for r in returns) == 2
    for call in (
        e.learn, e.collect_new_training_data, e.evaluate_val, e.save_checkpoint, e.write_latest_policy, e.train_epoch,
        e.delete_buffer_from_disk, lambda: e.log({"x": 1}, "val"), lambda: e.evaluate_test(tiny.tmaze, EPISODE),
    ):  # fmt: skip
        with pytest.raises(RunExistsError):
            call()
    e.close()
    assert contents() == before


def test_weights_of_an_earlier_run_continue_it_but_not_those_of_another(tmp_path):
    first, other = learned(tmp_path, ckpt_interval=1), learned(tmp_path, ckpt_interval=1, name="other")
    weights, path = tiny.weights(first), os.path.join(other.ckpt_dir, "policy_weights", "policy_epoch_0.pt")
    first.close()
    other.close()
    e = started(tmp_path)
    e.load_checkpoint_from_path(path, is_accelerate_state=False)
    with pytest.raises(RunExistsError):
        e.learn()
    e.load_checkpoint(0, resume_training_state=False)
    assert (tiny.differing(weights, tiny.weights(e)), e.epoch) == ([], 0)
    e.learn()


def test_collect_only_configures_the_data_set(tmp_path):
    e = experiment(tmp_path)
    assert not e.dataset.configured
    assert cli_utils.make_experiment_collect_only(e) is e
    assert e.dataset.configured
    assert not e.dataset.has_edit_rights
    e.epochs = 1
    e.start()
    e.learn()
    assert e.env_steps == 24
