"""An experiment that overrides how data, optimizer, states and updates are made, and an agent that reads older weights (R, H)."""

import os
import sys
from dataclasses import dataclass

import gin
import torch
from small import SIZES, experiment

import amago
from amago.cli_utils import use_config
from amago.utils import AdamWRel, get_constant_schedule_with_warmup


@gin.configurable
class OlderWeights(amago.agent.MultiTaskAgent):
    def init_extra_networks(self):
        super().init_extra_networks()
        self.added = torch.nn.Linear(2, 2)

    def load_state_dict(self, state_dict, strict=True, **kwargs):
        mine = self.state_dict()
        state_dict = {k.removeprefix("old."): v for k, v in state_dict.items()}
        missing = {k: v for k, v in mine.items() if k not in state_dict}
        return super().load_state_dict({**state_dict, **missing}, strict=strict, **kwargs)

    def on_checkpoint_loaded(self, is_resume=False):
        super().on_checkpoint_loaded(is_resume=is_resume)
        self.loaded = is_resume


@gin.configurable
@dataclass
class OwnExperiment(amago.Experiment):
    accumulate: int = 1
    my_root: str = ""

    def init_dsets(self):
        self.dataset = amago.loading.DiskTrajDataset(dset_root=self.my_root, dset_name=self.run_name, dset_max_size=50)
        return super().init_dsets()

    def init_optimizer(self, policy):
        return AdamWRel(policy.trainable_params, reset_interval=100, lr=self.learning_rate, weight_decay=self.l2_coeff)

    def init_model(self):
        super().init_model()
        self.lr_schedule = self.accelerator.prepare(get_constant_schedule_with_warmup(self.optimizer, self.lr_warmup_steps))

    def train_step(self, batch, log_step):
        metrics = super().train_step(batch, log_step)
        assert "Loss" in metrics, metrics
        return metrics

    def save_checkpoint(self):
        super().save_checkpoint()
        self.accelerator.save_state(
            os.path.join(self.ckpt_dir, "mine", f"{self.run_name}_epoch_{self.epoch}"), safe_serialization=False
        )

    def load_checkpoint(self, epoch, resume_training_state=True):
        self.asked = epoch
        return super().load_checkpoint(epoch, resume_training_state=resume_training_state)


if __name__ == "__main__":
    use_config(SIZES | {"OwnExperiment.accumulate": 2})
    exp = experiment(OwnExperiment, agent_type=OlderWeights, my_root=sys.argv[1])
    assert exp.accumulate == 2 and exp.DEVICE is not None
    exp.start()
    assert exp.epoch == 0
    exp.learn()
    older = {f"old.{k}": v for k, v in exp.policy.state_dict().items() if not k.startswith("added")}
    path = os.path.join(sys.argv[1], "older.pt")
    torch.save(older, path)
    exp.load_checkpoint_from_path(path, is_accelerate_state=False)
    assert exp.policy.loaded is False
    states = os.path.join(exp.ckpt_dir, "training_states")
    assert sorted(os.listdir(states)), os.listdir(exp.ckpt_dir)
    exp.close()
    again = experiment(OwnExperiment, agent_type=OlderWeights, my_root=sys.argv[1], epochs=4)
    again.start()
    again.load_checkpoint(1, resume_training_state=True)
    assert again.asked == 1 and again.policy.loaded is True
    again.learn()
    again.close()
