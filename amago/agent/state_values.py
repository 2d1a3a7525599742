"""Values of states by expectile regression: implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169)."""

from __future__ import annotations

import torch
from torch import Tensor

from amago import ops
from amago.agent.heads import AgentWithHeads
from amago.nets.heads import outputs_of


class AgentWithStateValues(AgentWithHeads):
    """A base class of agents that may learn values of states, ``state_values``, in place of those of the policy's actions."""

    critics_td_per_step: bool
    n_step: int

    def _n_step_target(self, next_state: Tensor, rews: Tensor, dones: Tensor, real: Tensor) -> Tensor:
        """`_td_target`, bootstrapped with the values of states."""
        value = self.values.returns(self._state_value(next_state))
        rews, dones, real = (x[:, :, None, None] for x in (rews, dones, real))
        return ops.n_step_return(rews, dones, value, self.gammas[:, None], real, n=self.n_step)

    def _evaluate_taken(self, state: Tensor, stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the actions of the data, and the states alone.

        Returns:
            the critics' outputs (B, L, C, G, O) for ``stored`` and the values (B, L, 1, G, 1) of ``state``, both with gradients; the
            values (B, L, 1, G, 1) of ``stored`` by random target critics.
        """
        out = outputs_of(self.critics(state, stored[None]))[0]
        with torch.no_grad():
            taken = self._reduce(self._drawn_target_values(state, stored[None])[0])
        return out, self._state_value(state), taken

    def _state_value(self, state: Tensor) -> Tensor:
        """(B, L, D) -> values (B, L, 1, G, 1), on the scale of the critics' outputs."""
        assert self.state_values is not None
        value: Tensor = self.state_values(state)[:, :, None]
        scale = getattr(self.critics, "output_scale", None)
        return value if scale is None else value * scale

    def _state_value_loss(self, value: Tensor, taken: Tensor) -> Tensor:
        """The loss (B, L, 1, G, 1) of values of states, normalised as that of the critics is."""
        assert self.expectile is not None
        return ops.expectile_loss(self.values.objective(taken) - self.values.objective(value), self.expectile)

    def _drawn_target_values(self, state: Tensor, actions: Tensor) -> Tensor:
        """The values of actions (K, B, L, G, A) by ``num_critics_td`` random target critics, (K, B, L, drawn, G, 1)."""
        num, critics = self.num_critics_td, self.target_critics
        if not self.critics_td_per_step:
            drawn = torch.randint(critics.num_critics, (num,), device=state.device)
            return self.values.value(critics.evaluate_subset(state, actions, drawn))
        every = self.values.value(outputs_of(critics(state, actions)))
        shape = (*state.shape[:2], num, len(self.gammas), 1)
        drawn = torch.randint(critics.num_critics, shape, device=state.device)
        return every.gather(3, drawn.expand(len(every), *shape))
