"""A timestep encoder that reads the tokens of an observation with a transformer of its own (M)."""

import gin
import gymnasium as gym
import torch
from small import SIZES, experiment, run
from torch import nn

import amago
from amago.cli_utils import use_config
from amago.nets.ff import MLP, Normalization
from amago.nets.tstep_encoders import TstepEncoder, register_tstep_encoder
from amago.nets.utils import InputNorm, add_activation_log, symlog


class Tokens(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.tformer = amago.nets.traj_encoders.TformerTrajEncoder(
            tstep_dim=d, max_seq_len=3, d_model=16, n_heads=2, d_ff=32, n_layers=1, pos_emb="learnable",
            attention_type=amago.nets.transformer.VanillaAttention,
        )  # fmt: skip
        assert (self.tformer.d_model, self.tformer.n_heads, self.tformer.n_layers, self.tformer.head_dim) == (16, 2, 1, 8)
        assert self.tformer.attention_type is amago.nets.transformer.VanillaAttention
        assert self.tformer.tformer.d_model == self.tformer.tformer.layers[0].d_model == 16

    def forward(self, tokens):
        time_idxs = torch.arange(tokens.shape[1], device=tokens.device)[None, :, None].expand(len(tokens), -1, 1)
        x = self.tformer.tformer.preprocess_seq(tokens, time_idxs)
        for layer in self.tformer.tformer.layers:
            x = layer(x)
        mine = self.tformer.tformer.norm(x)
        if not self.training:
            whole = self.tformer.tformer.training_forward(tokens, time_idxs)
            torch.testing.assert_close(mine, whole)
            torch.testing.assert_close(self.tformer(seq=tokens, time_idxs=time_idxs)[0], whole)
        return mine.mean(1)


@register_tstep_encoder("tokens")
@gin.configurable
class TokenTstepEncoder(TstepEncoder):
    def __init__(self, obs_space, rl2_space, d_emb=8, hide_rl2s=False, hide_rewards=False):
        super().__init__(obs_space=obs_space, rl2_space=rl2_space, hide_rl2s=hide_rl2s, hide_rewards=hide_rewards)
        assert isinstance(self.obs_space, gym.spaces.Dict)
        self.words = nn.Embedding(5, d_emb, padding_idx=4)
        self.tokens = Tokens(d_emb)
        self.norm = InputNorm(rl2_space.shape[-1])
        self.merge = MLP(d_inp=16 + 1 + rl2_space.shape[-1], d_hidden=16, n_layers=1, d_output=12)
        self.out_norm = Normalization("rmsnorm", 12)

    @property
    def emb_dim(self):
        return 12

    def inner_forward(self, obs, rl2s, log_dict=None):
        B, L, _ = obs["digit"].shape
        tokens = self.words(obs["digit"].long().clamp(0, 4)).reshape(B * L, 1, -1).expand(-1, 3, -1)
        words = self.tokens(tokens).reshape(B, L, -1)
        if self.training:
            self.norm.update_stats(rl2s)
        rl2s = self.norm.normalize_values(rl2s)
        out = self.out_norm(self.merge(torch.cat((words, symlog(obs["turn"]), rl2s), -1)))
        add_activation_log(root_key="tokens-out", activation=out, log_dict=log_dict)
        return out


if __name__ == "__main__":
    use_config(SIZES)
    assert amago.nets.get_tstep_encoder_cls("tokens") is TokenTstepEncoder
    exp = run(experiment(tstep_encoder_type=TokenTstepEncoder))
    assert any(k.startswith("activation-tokens-out") for k in exp.policy.update_info), list(exp.policy.update_info)
