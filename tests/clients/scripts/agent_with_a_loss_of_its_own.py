"""An agent whose forward pass is written from the parts of the original's, with its statistics (H)."""

import gin
import torch
import torch.nn.functional as F
from small import SIZES, experiment, run

import amago
from amago.cli_utils import use_config
from amago.loading import MAGIC_PAD_VAL
from amago.utils import masked_avg


@gin.configurable
class OwnLoss(amago.agent.Agent):
    def init_extra_networks(self):
        super().init_extra_networks()
        self.aux = torch.nn.Linear(self.traj_encoder.emb_dim, 1)

    @property
    def trainable_params(self):
        yield from super().trainable_params
        yield from self.aux.parameters()

    def get_grad_norms(self):
        return super().get_grad_norms() | {"Aux Grad Norm": amago.utils.get_grad_norm(self.aux)}

    def forward(self, batch, log_step):
        self.update_info = {}
        active = log_step
        o = self.tstep_encoder(obs=batch.obs, rl2s=batch.rl2s, log_dict=self.update_info if active else None)
        s, hidden_state = self.traj_encoder(seq=o, time_idxs=batch.time_idxs, hidden_state=None, log_dict=None)
        assert hidden_state is None
        B, L, _ = s.shape
        G, C = len(self.gammas), len(self.critics)
        assert self.num_critics == C
        assert self.actor.gammas.numel() == self.critics.gammas.numel() == G
        mask = (~((batch.rl2s == MAGIC_PAD_VAL).all(-1, keepdim=True))).float()
        state_mask = mask[:, 1:, ...]
        critic_mask = state_mask[:, :, None, None].expand(B, L - 1, C, G, 1)
        actor_mask = state_mask[:, :, None].expand(B, L - 1, G, 1)
        r = self.reward_multiplier * batch.rews.unsqueeze(2).unsqueeze(2).expand(B, L - 1, 1, G, 1)
        d = batch.dones.unsqueeze(2).unsqueeze(2).expand(B, L - 1, 1, G, 1)
        a = batch.actions.clamp(0, 1).unsqueeze(2).expand(B, L - 1, G, self.action_dim)
        gamma = self.gammas.to(s.device).unsqueeze(-1)
        a_dist = self.actor(s, log_dict=self.update_info if active else None, straight_from_obs=None)
        with torch.no_grad():
            ap = self.target_actor(s)
            q_targ = self.target_critics(s, ap.probs.unsqueeze(0))
            q_targ = self.popart(q_targ, normalized=False)
            q_targ = self._reduce_critic_ensemble(q_targ.mean(0))[:, 1:]
            y = r + gamma * (1.0 - d.float()) * q_targ
            self.popart.update_stats(y, mask=critic_mask[:, :, :1])
            y_norm = self.popart.normalize_values(y)
        q = self.critics(s[:, :-1], a.unsqueeze(0)).mean(0)
        critic_loss = (self.popart(q) - y_norm.detach()).pow(2)
        logp = a_dist.log_prob(index_of(batch.actions, G)).unsqueeze(-1)
        logp = logp[:, :-1]
        with torch.no_grad():
            val_s = self.maximized_critics(s.detach()[:, :-1], a_dist.probs[:, :-1].unsqueeze(0)).mean(0).mean(2)
            advantages = q.mean(2) - val_s
            filter_ = self.fbc_filter_func(advantages).float()
        actor_loss = -(filter_.detach() * logp)
        if active:
            self.update_info |= self._td_stats(critic_mask, q, y, r=r)
            self.update_info |= self._policy_stats(actor_mask, a_dist)
            self.update_info |= self._filter_stats(actor_mask, logp, filter_)
            self.update_info |= self._popart_stats()
        loss = self.offline_coeff * masked_avg(actor_loss, actor_mask) + self.critic_loss_weight * masked_avg(
            critic_loss, critic_mask
        )
        aux = masked_avg(F.mse_loss(self.aux(s[:, :-1]), batch.rews, reduction="none"), state_mask)
        self.update_info |= {"Aux Loss": aux.detach(), "Critic Loss": critic_loss.mean(), "Actor Loss": actor_loss.mean()}
        return loss + aux


def index_of(actions, G):
    index = torch.cat((actions, actions[:, -1:]), 1).argmax(-1)  # (B, L)
    return index.unsqueeze(-1).expand(*index.shape, G)


if __name__ == "__main__":
    use_config(SIZES)
    exp = run(experiment(agent_type=OwnLoss))
    assert exp.policy.actor_type is amago.nets.actor_critic.Actor, exp.policy.actor_type
    assert exp.policy.critic_type is amago.nets.actor_critic.NCritics
    info = exp.policy.update_info
    assert any("Entropy" in k for k in info), list(info)
