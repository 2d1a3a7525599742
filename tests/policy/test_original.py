"""Weights that the original system trained, as the golden vectors hold them, act here as if they were ours."""

import pytest
import torch
from golden import load
from golden_agents import CASES, golden_agent
from messages import naming

from amago.policy.original import adapt_weights
from amago.run import checkpoint
from amago.run.weights import load_into, load_weights


def theirs(name):
    return {k: torch.as_tensor(v) for k, v in load(name)[1].items()}


def rollout(agent, batch):
    """Greedy actions of every discount, step by step."""
    memory, actions = agent.init_hidden_state(3, "cpu"), []
    for t in range(8):
        obs = {k: v[:, t] for k, v in batch.obs.items()}
        for g in range(3):
            taken, after = agent.get_actions(obs, batch.rl2s[:, t], batch.time_idxs[:, t], memory, sample=False, gamma_idx=g)
            actions.append(taken)
        memory = after
    return torch.stack(actions)


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", CASES)
def test_a_file_of_theirs_loads_and_acts(tmp_path, name, wrapper):
    expected, batch, _ = golden_agent(name)
    agent, _, _ = golden_agent(name)
    with torch.no_grad():
        for p in agent.parameters():
            p.zero_()
    path = tmp_path / "policy_epoch_3.pt"
    torch.save({wrapper + k: v for k, v in theirs(name).items()}, path)
    if wrapper:
        with pytest.raises(checkpoint.CheckpointError):
            load_into(agent, load_weights(path), path)
    load_into(agent, adapt_weights(load_weights(path), agent), path)
    for k, v in expected.state_dict().items():
        assert v.equal(agent.state_dict()[k]), k
    with torch.no_grad():
        for part in ("actor", "target_actor"):  # so that greedy actions differ from step to step
            getattr(expected, part).base.out_layer.bias.zero_()
            getattr(agent, part).base.out_layer.bias.zero_()
        a, b = rollout(expected.eval(), batch), rollout(agent.eval(), batch)
    assert a.equal(b)
    assert len(a.unique()) > 1


def test_our_own_weights_come_back_as_they_are():
    agent, _, _ = golden_agent("agent_discrete")
    own = agent.state_dict()
    adapted = adapt_weights(own, agent)
    assert adapted.keys() == own.keys()
    assert all(adapted[k] is own[k] for k in own)
    del own["actor.base.in_layer.bias"]
    assert adapt_weights(own, agent).keys() == own.keys()  # what is wrong with them, load_into says


def test_whatever_does_not_fit_is_named():
    agent, _, _ = golden_agent("multitask_discrete")
    weights = theirs("multitask_discrete")
    weights["world_model.weight"] = torch.zeros(2, 3)
    weights["actor.base.in_layer.bias"] = torch.zeros(99)
    del weights["popart.mu"], weights["critics.net.inp_layer.bias"]
    with pytest.raises(checkpoint.CheckpointError) as err:
        adapt_weights({f"module.{k}": v for k, v in weights.items()}, agent)
    for part in (
        "world_model.weight (2, 3)",
        "popart.mu (3, 1)",
        "critics.net.inp_layer.bias (1, 1, 1, 16)",
        "actor.base.in_layer.bias",
        "(99,)",
        "(16,)",
    ):
        assert part in str(err.value)
    assert "maximized" not in str(err.value)


def test_names_that_collide_once_unwrapped_are_refused():
    agent, _, _ = golden_agent("agent_discrete")
    weights = agent.state_dict()
    weights["module.popart.mu"] = torch.ones(3, 1)
    with pytest.raises(checkpoint.CheckpointError, match=naming("twice", "module.")):
        adapt_weights(weights, agent)
