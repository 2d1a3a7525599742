"""The two agents, and their names for command lines and `amago.cli_utils.switch_agent`."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import gin

from amago.agent.actor_critic import ActorCriticAgent
from amago.agent.base import BaseAgent
from amago.agent.options import MultiTaskOptions
from amago.agent.values import PopArtValues, TwoHotValues
from amago.registry import Registry

A = TypeVar("A", bound=ActorCriticAgent)


def with_options(agent: type[A]) -> type[A]:
    """Give an agent's class a constructor whose signature shows the fields of its ``options_type``.

    gin, help texts and `inspect.signature` read names and defaults from there.
    """
    own = [p for p in inspect.signature(ActorCriticAgent.__init__).parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = inspect.signature(agent.options_type).parameters.values()

    def __init__(self: A, *args: Any, **kwargs: Any) -> None:
        super(agent, self).__init__(*args, **kwargs)

    marked: Any = __init__
    marked.__signature__ = inspect.Signature([*own, *fields], return_annotation=None)
    marked.__module__, marked.__qualname__ = agent.__module__, f"{agent.__qualname__}.__init__"
    agent.__init__ = marked  # type: ignore[method-assign]
    return agent


@gin.configurable(module="amago.agent")
@with_options
class Agent(ActorCriticAgent):
    """Actor and critic ensemble on a shared sequence model, trained for several discounts at once.

    Critics output a scalar for each discount. Discrete actions: they output the value of every action, and the policy's
    probabilities weigh these, so that the expectation over actions is exact.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        options: fields of `amago.agent.options.ActorCriticOptions`, where names, defaults and meanings are.

    Raises:
        TypeError: an unknown option.
        ValueError: an option is out of range, both losses are switched off, or a policy gradient is set for a distribution
            without reparametrised samples.
    """

    values_type, exact_expectation = PopArtValues, True


@gin.configurable(module="amago.agent")
@with_options
class MultiTaskAgent(ActorCriticAgent):
    """An agent whose losses do not depend on the scale of returns, for tasks whose rewards differ by orders of magnitude
    (Grigsby et al. 2024, arXiv 2411.11188).

    Critics classify returns instead of regressing them, and the policy imitates the actions of the data whose value exceeds
    the value of its own actions; the policy gradient is off. Discrete actions reach the critics as one-hot samples, as
    continuous ones do.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        options: fields of `amago.agent.options.MultiTaskOptions`. Four defaults differ from `Agent`'s: ``online_coeff``
            0 (if it is positive, discrete actions get their gradient by straight-through Gumbel-softmax), ``offline_coeff`` 1,
            ``num_actions_for_value_in_actor_loss`` 3, and ``critic_type`` `amago.nets.actor_critic.NCriticsTwoHot`, whose
            arguments set the range of returns (times ``reward_multiplier``) that the bins cover.

    Raises:
        TypeError, ValueError: see `Agent`.
    """

    options_type, values_type, exact_expectation, filters_last_observation = MultiTaskOptions, TwoHotValues, False, True


AGENTS: Registry[type[BaseAgent]] = Registry("agent")
"""The agent of each name."""

register_agent = AGENTS.register
get_agent_cls = AGENTS.find
list_registered_agents = AGENTS.names

register_agent("agent")(Agent)
register_agent("multitask")(MultiTaskAgent)
