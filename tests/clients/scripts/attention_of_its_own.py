"""Attention kernels and sequence models of a client's own (H, M)."""

import gin
import torch
from small import SIZES, experiment, run
from torch import nn

import amago
from amago.cli_utils import switch_traj_encoder, use_config
from amago.nets import transformer
from amago.nets.traj_encoders import TrajEncoder, register_traj_encoder


@gin.configurable
class PlainAttention(transformer.SelfAttention):
    def __init__(self, causal=True, dropout=0.0, scale=1.0):
        super().__init__(causal=causal, dropout=dropout)
        self.scale = scale

    def forward(self, qkv, key_cache=None, val_cache=None, cache_seqlens=None):
        B, L, _, H, E = qkv.shape
        q, k, v = qkv.unbind(2)
        if key_cache is not None:
            rows = torch.arange(B, device=qkv.device)
            key_cache[rows, cache_seqlens.long()] = k[:, 0].to(key_cache.dtype)
            val_cache[rows, cache_seqlens.long()] = v[:, 0].to(val_cache.dtype)
            k, v = key_cache, val_cache
            mask = torch.arange(k.shape[1], device=qkv.device)[None] <= cache_seqlens.long()[:, None]
            mask = mask[:, None, None]
            v = v.nan_to_num()
            k = k.nan_to_num()
        else:
            mask = torch.ones(L, L, dtype=torch.bool, device=qkv.device).tril()[None, None] if self.causal else None
        scores = torch.einsum("blhe,bshe->bhls", q, k.to(q.dtype)) * self.scale / E**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return torch.einsum("bhls,bshe->blhe", scores.softmax(-1), v.to(q.dtype))


@register_traj_encoder("lstm")
@gin.configurable
class LSTMTrajEncoder(TrajEncoder):
    def __init__(self, tstep_dim, max_seq_len, d_hidden=16):
        super().__init__(tstep_dim=tstep_dim, max_seq_len=max_seq_len)
        self.net, self._emb_dim = nn.LSTM(tstep_dim, d_hidden, batch_first=True), d_hidden

    @property
    def emb_dim(self):
        return self._emb_dim

    def init_hidden_state(self, batch_size, device):
        return tuple(torch.zeros(1, batch_size, self._emb_dim, device=device) for _ in range(2))

    def reset_hidden_state(self, hidden_state, dones):
        for part in hidden_state:
            part[:, dones] = 0.0
        return hidden_state

    def forward(self, seq, time_idxs, hidden_state=None, log_dict=None):
        return self.net(seq, hidden_state)


if __name__ == "__main__":
    use_config(SIZES | {"TformerTrajEncoder.attention_type": PlainAttention, "TformerTrajEncoder.pos_emb": "rope"})
    exp = run(experiment())
    layer = exp.policy.traj_encoder.tformer.layers[0]
    assert layer.ff1.in_features == 16 and layer.ff1.out_features == 32
    assert isinstance(exp.policy.traj_encoder.tformer.position_embedding, transformer.RotaryPosEmb)
    exp.close()
    config = {}
    lstm = switch_traj_encoder(config, LSTMTrajEncoder, d_hidden=12)
    use_config(config)
    assert "lstm" in amago.list_registered_traj_encoders()
    run(experiment(traj_encoder_type=lstm, run_name="lstm", agent_type=amago.Agent))
