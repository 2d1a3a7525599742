"""The memory of one environment of a policy, read and set; actions of a call without chance; what a policy shows of itself."""

import copy

import numpy as np
import pytest
import tiny

from amago.policy import Policy


@pytest.fixture(scope="module", params=[*tiny.TRAJ, "mamba"])
def agent(request):
    from amago import config
    from amago.nets.traj_encoders import MambaTrajEncoder

    made = tiny.agent(tiny.pendulum(), {"mamba": MambaTrajEncoder}.get(request.param, request.param), max_seq_len=8)
    config.reset_config()
    return made


def steps(n, rows, seed):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(rows, 3)).astype(np.float32), rng.normal(size=rows).astype(np.float32)) for _ in range(n)]


def play(policy, inputs):
    return np.array([policy.act(obs, reward) for obs, reward in inputs])


def test_a_row_goes_on_from_a_memory_in_another_row_and_in_another_policy(agent):
    """Also beyond the model's context, and the other rows are left alone."""
    for before in (3, 12):
        several, one = Policy(copy.deepcopy(agent), 3, False, "cpu"), Policy(copy.deepcopy(agent), None, False, "cpu")
        play(several, steps(before, 3, 0))
        kept, later = several.memory(1), steps(4, 3, 1)
        expected = play(several, later)
        assert kept.time == before, "a copy"
        other = Policy(copy.deepcopy(agent), 3, False, "cpu")
        play(other, steps(5, 3, 2))
        neighbour = copy.deepcopy(other)
        other.set_memory(kept, row=2)
        turned = [(obs[[0, 2, 1]], reward[[0, 2, 1]]) for obs, reward in later]
        found, alone = play(other, turned), play(neighbour, turned)
        assert found[:, 2] == pytest.approx(expected[:, 1], abs=1e-6)
        assert found[:, :2] == pytest.approx(alone[:, :2], abs=1e-6)
        one.set_memory(kept)
        assert play(one, [(obs[1], reward[1]) for obs, reward in later]) == pytest.approx(expected[:, 1], abs=1e-6)


def test_what_is_no_row_or_of_another_agent_is_refused():
    wide = tiny.agent(tiny.pendulum(), "gru", bindings={"GRUTrajEncoder.d_hidden": 24})
    gru, other, discrete = (tiny.agent(env(), "gru") for env in (tiny.pendulum, tiny.pendulum, tiny.cartpole))
    policy = Policy(gru, 2, False, "cpu")
    play(policy, steps(2, 2, 0))
    for row in (-1, 2):
        with pytest.raises(ValueError, match=f"row must be from 0 to 1, got {row}"):
            policy.memory(row)
    for stranger in (wide, discrete, tiny.agent(tiny.pendulum(), "transformer")):
        with pytest.raises(ValueError, match="memory"):
            policy.set_memory(Policy(stranger, None, False, "cpu").memory())
    policy.set_memory(Policy(other, None, False, "cpu").memory(), 1)
    assert policy.memory(1).time == 0


def test_a_call_without_chance(agent):
    policy = Policy(agent, None, True, "cpu")
    (obs, _), *_ = ((o[0], r) for o, r in steps(1, 1, 0))
    of = lambda **options: (policy.reset(), policy.act(obs, **options))[1].item()  # noqa: E731
    assert len({of(deterministic=True) for _ in range(5)}) == 1
    assert len({of() for _ in range(5)}) > 1
    policy.sample = False
    assert len({of() for _ in range(5)}) == 1
    assert len({of(deterministic=False) for _ in range(5)}) > 1
    assert of() == of(deterministic=True)


def test_a_policy_describes_itself():
    text = repr(Policy(tiny.agent(tiny.cartpole(), "gru"), 4, True, "cpu"))
    assert text.startswith("<Policy Agent: FFTstepEncoder -> GRUTrajEncoder, ")
    assert "4 environments, Discrete(2), actions sampled" in text
    assert len(text) < 200
