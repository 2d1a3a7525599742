"""The agent of the duel: a loss of its own, masks, and weights of actions that follow the scale of advantages."""

import itertools

import gin
import torch
import torch.nn.functional as F
from torch import nn

from amago.agent import MultiTaskAgent
from amago.loading import MAGIC_PAD_VAL
from amago.utils import masked_avg


@gin.configurable(module="custom")
class AdvantageWeights:
    """exp(beta * advantage / running scale), clipped. The scale is that of the steps that count."""

    def __init__(self, beta=1.0, clip_high=5.0, momentum=0.9):
        self.beta, self.clip_high, self.momentum = beta, clip_high, momentum
        self.scale, self.mask, self.calls = 1.0, None, 0

    def set_mask(self, mask):
        self.mask = mask

    def __call__(self, adv):
        self.calls += 1
        if self.mask is not None and torch.is_grad_enabled():
            seen = float(masked_avg(adv.detach().abs()[:, : self.mask.shape[1]], self.mask.float()))
            self.scale = self.momentum * self.scale + (1 - self.momentum) * seen
        return torch.exp(self.beta * adv / max(self.scale, 1e-3)).clamp(max=self.clip_high)


@gin.configurable
class DuelLearner(MultiTaskAgent):
    """Also predicts the sum of the rewards of a sequence. Steps whose action is unknown train the critics alone."""

    def __init__(self, *args, return_loss_weight=0.5, **kwargs):
        self.return_loss_weight = return_loss_weight
        super().__init__(*args, **kwargs)

    def init_extra_networks(self):
        super().init_extra_networks()
        self.return_head = nn.Linear(self.traj_encoder.emb_dim, 1)

    @property
    def trainable_params(self):
        return itertools.chain(super().trainable_params, self.return_head.parameters())

    def edit_actor_mask(self, batch, actor_loss, pad_mask):
        known = batch.actions.sum(-1, keepdim=True) > 0
        return pad_mask & known.unsqueeze(-2).expand_as(pad_mask)

    def edit_critic_mask(self, batch, critic_loss, pad_mask):
        if critic_loss is None:
            return pad_mask
        return pad_mask & (batch.rews.abs() < 100)[..., None, None].expand_as(pad_mask)

    def forward(self, batch, log_step):
        real = ~((batch.rl2s == MAGIC_PAD_VAL).all(-1, keepdim=True))
        if hasattr(self.fbc_filter_func, "set_mask"):
            self.fbc_filter_func.set_mask(real[:, 1:].unsqueeze(-2).expand(-1, -1, len(self.gammas), -1))
        loss = super().forward(batch, log_step)
        state, _ = self.get_state_embedding(batch.obs, batch.rl2s, batch.time_idxs)
        target = (batch.rews * real[:, 1:]).sum(1, keepdim=True).expand_as(batch.rews)
        error = F.smooth_l1_loss(self.return_head(state[:, :-1]), target, reduction="none")
        return_loss = masked_avg(error, real[:, 1:])
        self.update_info["Return Loss"] = return_loss.detach()
        if log_step:
            self.update_info["Advantage Scale"] = self.fbc_filter_func.scale
        return loss + self.return_loss_weight * return_loss
