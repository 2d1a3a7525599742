"""`Experiment.start` speaks up about faulty encoders of the user's own."""

import warnings

import pytest
import tiny
import torch
from messages import naming
from torch import nn

import amago
from amago.nets.tstep_encoders import FFTstepEncoder


class Momentary(amago.TrajEncoder):
    def __init__(self, tstep_dim, max_seq_len):
        super().__init__(tstep_dim, max_seq_len)
        self.layer = nn.Linear(tstep_dim, 8)

    @property
    def emb_dim(self):
        return 8

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return torch.tanh(self.layer(seq)), hidden_state


class Forgetful(Momentary):
    """Learns from the past of a sequence, and forgets it when it acts."""

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return torch.tanh(self.layer(seq)).cumsum(1), hidden_state


class Noisy(FFTstepEncoder):
    def inner_forward(self, obs, rl2s, log_dict=None, mask=None):
        out = super().inner_forward(obs, rl2s, log_dict, mask)
        return out + torch.rand_like(out)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"traj_encoder_type": Forgetful}, ("test_own_parts.Forgetful", "step 1 of a rollout", "whole sequence")),
        ({"tstep_encoder_type": Noisy}, ("test_own_parts.Noisy", "evaluation mode")),
    ],
)
def test_parts_that_act_otherwise_than_they_learned(tmp_path, part, named):
    with pytest.warns(UserWarning, match=naming(*named)):
        tiny.started(tmp_path, **part)


def test_others_start_in_silence_and_train_as_before(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = tiny.learned(tmp_path / "a", traj_encoder_type=Momentary)
    monkeypatch.setattr(amago.experiment, "warn_of_faulty_parts", lambda agent: None)
    not_checked = tiny.learned(tmp_path / "b", traj_encoder_type=Momentary)
    assert not tiny.differing(tiny.weights(checked), tiny.weights(not_checked)), "the random numbers of the run are left alone"
