"""Reads the duel's tokens, and keeps the policy from illegal actions."""

import gin
import torch
from torch import nn

import amago
from amago.nets.actor_critic import Actor
from amago.nets.ff import MLP, Normalization
from amago.nets.utils import add_activation_log, symlog


@gin.configurable
class DuelTstepEncoder(amago.TstepEncoder):
    """Attends over the words' embeddings with the numbers as the query."""

    def __init__(self, obs_space, rl2_space, vocabulary=gin.REQUIRED, d_word=16, d_hidden=32, token_mask_aug=True):
        super().__init__(obs_space=obs_space, rl2_space=rl2_space)
        self.token_mask_aug = token_mask_aug
        numbers = obs_space["numbers"].shape[0] + rl2_space.shape[0]
        self.words = nn.Embedding(vocabulary + 1, d_word)  # token -1 comes first
        self.numbers = MLP(d_inp=numbers, d_hidden=d_hidden, n_layers=1, d_output=d_word, activation="leaky_relu")
        self.attention = nn.MultiheadAttention(d_word, num_heads=2, batch_first=True)
        self.merge = MLP(2 * d_word + obs_space["illegal_actions"].shape[0], d_hidden, 1, d_hidden, activation="leaky_relu")
        self.out_norm = Normalization("layer", d_hidden)
        self._emb_dim = d_hidden

    @property
    def emb_dim(self):
        return self._emb_dim

    def inner_forward(self, obs, rl2s, log_dict=None):
        B, L, _ = rl2s.shape
        tokens = obs["text_tokens"].long() + 1
        if self.training and self.token_mask_aug:
            tokens = torch.where(torch.rand(tokens.shape, device=tokens.device) < 0.1, torch.zeros_like(tokens), tokens)
        words = self.words(tokens).view(B * L, tokens.shape[-1], -1)
        numbers = self.numbers(torch.cat((symlog(obs["numbers"]), symlog(rl2s)), dim=-1))
        read, _ = self.attention(numbers.view(B * L, 1, -1), words, words)
        merged = torch.cat((read.view(B, L, -1), numbers, obs["illegal_actions"].float()), dim=-1)
        out = self.out_norm(self.merge(merged))
        add_activation_log("duel-encoder-out", out, log_dict)
        return out


@gin.configurable
class LegalActor(Actor):
    """Gives illegal actions no chance: one of -1e4 would be drawn once in a thousand times."""

    def actor_network_forward(self, state, log_dict=None, straight_from_obs=None):
        scores = super().actor_network_forward(state, log_dict=log_dict, straight_from_obs=straight_from_obs)
        illegal = straight_from_obs["illegal_actions"].bool()
        return torch.where(illegal.unsqueeze(-2), torch.full_like(scores, -torch.inf), scores)
