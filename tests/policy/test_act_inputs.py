"""What `Policy.act` takes: observations as environments return them, rewards, which it does not forget, and the memory of a row."""

import copy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import naming

from amago.policy import Policy, describe_agent
from amago.spaces import NonFiniteError, action_spec, obs_spec, rl2_space

G = gym.spaces
B = 3


def policy_for(raw, num_envs=None, bindings=None, traj="gru"):
    """A policy of a new agent for an environment with these observations, as a run would describe it."""
    action = G.Discrete(7)
    spaces = SimpleNamespace(
        observation_space=obs_spec(raw).space, rl2_space=rl2_space(action_spec(action)), action_space=action
    )
    agent = tiny.agent(spaces, traj, bindings=bindings)
    return Policy(agent, num_envs, sample=False, device="cpu", description=describe_agent(agent, raw))


def seen_by(policy, *args):
    """What the networks of a policy observe in one call of `act`: observations, reward and previous action."""
    seen = []
    hook = policy.agent.tstep_encoder.register_forward_pre_hook(lambda _, a, k: seen.append(k), with_kwargs=True)
    try:
        action = policy.act(*args)
    finally:
        hook.remove()
    return {k: v.numpy() for k, v in seen[0]["obs"].items()}, seen[0]["rl2s"].numpy(), action


LEAVES = st.one_of(
    st.builds(G.Discrete, st.integers(1, 5), start=st.integers(-3, 3)),
    st.builds(G.MultiBinary, st.sampled_from([1, 3, (2, 2)])),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda n: G.MultiDiscrete(n, start=[5] * len(n))),
    st.just(G.MultiDiscrete([[2, 3], [1, 4]])),
    st.sampled_from([(), (1,), (4,), (2, 3)]).flatmap(
        lambda shape: st.sampled_from([np.float32, np.float64, np.int64, np.int8]).map(lambda dtype: G.Box(-9, 9, shape, dtype))
    ),
    st.just(G.Box(0, 255, (8, 8, 3), np.uint8)),
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda spaces: G.Tuple(spaces)),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(G.Dict),
    ),
    max_leaves=5,
)
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@PROPERTY
@given(raw=SPACES, seed=st.integers(0, 1000))
def test_what_the_environment_returned_is_what_training_saw(raw, seed):
    raw.seed(seed)
    convert, once, again = obs_spec(raw).convert, policy_for(raw), policy_for(raw)
    for t in range(3):
        obs = raw.sample()
        seen, _, action = seen_by(once, obs, 0.5 * t)
        expected, _, same = seen_by(again, convert(obs), 0.5 * t)
        assert action == same
        assert list(seen) == list(expected)
        for key, value in convert(obs).items():
            np.testing.assert_array_equal(seen[key][0, 0], value)
            np.testing.assert_array_equal(expected[key][0, 0], value)
            assert seen[key].dtype == value.dtype


@PROPERTY
@given(raw=SPACES, seed=st.integers(0, 1000))
def test_batches_in_every_form(raw, seed):
    raw.seed(seed)
    rows = [raw.sample() for _ in range(B)]
    together = gym.vector.utils.concatenate(raw, rows, gym.vector.utils.create_empty_array(raw, B))
    convert = obs_spec(raw).convert
    each = [convert(row) for row in rows]
    converted = {key: np.stack([row[key] for row in each]) for key in each[0]}
    actions = []
    for form in (together, rows, converted, each):
        seen, _, action = seen_by(policy_for(raw, B), form)
        actions.append(action.tolist())
        for key, value in converted.items():
            np.testing.assert_array_equal(seen[key][:, 0], value, err_msg=str(type(form)))
    assert all(a == actions[0] for a in actions)


@pytest.mark.parametrize(
    ("raw", "obs", "named"),
    [
        (G.Discrete(5), 7, ("observation", 7, "Discrete(5)")),
        (G.Discrete(5), 1.5, ("observation", "float64", "Discrete(5)")),
        (G.Discrete(5), "two", ("observation",)),
        (G.Tuple((G.Discrete(3), G.Discrete(2))), (1,), ("obs", 1, "tuple of 2")),
        (G.Tuple((G.Discrete(3), G.Discrete(2))), 1, ("obs", "tuple of 2", "int")),
        (G.Dict(a=G.Dict(b=G.Discrete(3))), {"a": {"c": 1}}, ("obs['a']", ["c"], ["b"])),
        (G.Dict(a=G.Dict(b=G.Discrete(3))), {"a": 1}, ("obs['a']", "int", ["b"])),
        (G.Box(0, 255, (4, 4, 3), np.uint8), np.full((4, 4, 3), 0.5), ("observation", "float64", "uint8")),
        (G.Box(-1, 1, (2,)), np.array([0.0, np.nan]), ("obs['observation']", "nan", "finite")),
        (G.Box(-1, 1, (2,)), {"position": np.zeros(2)}, ("obs", ["position"], ["observation"])),
        (G.Box(-1, 1, (2,)), {"observation": np.zeros(2), "x": 1}, ("obs", ["observation", "x"], ["observation"])),
        (G.Box(-1, 1, (2,)), np.zeros((1, 2)), ("obs['observation']", (1, 2), (2,))),
    ],
)
def test_what_is_refused(raw, obs, named):
    policy = policy_for(raw)
    with pytest.raises(ValueError, match=naming(*named)):
        policy.act(obs)


def test_another_number_of_observations():
    policy = policy_for(G.Tuple((G.Discrete(3), G.Discrete(2))), num_envs=3)
    with pytest.raises(ValueError, match=naming("obs", 2, 3)):
        policy.act([(0, 0), (1, 1)])
    with pytest.raises(ValueError, match=naming("obs['observation']", (2, 2), (3, 2))):
        policy_for(G.Box(-1, 1, (2,)), num_envs=3).act(np.zeros((2, 2)))


LINE = G.Box(-1.0, 1.0, (2,))
OBS = np.zeros(2, np.float32)


def test_a_missing_reward_is_an_error_that_changes_nothing():
    policy, other = policy_for(LINE), policy_for(LINE)
    for p in (policy, other):
        p.act(OBS)
    with pytest.raises(ValueError, match=naming("reward", "act(obs, reward)", "reward=0.0", "done=True", "step 1")):
        policy.act(OBS)
    for t in range(4):
        mine, theirs = seen_by(policy, OBS + t / 10, 1.0), seen_by(other, OBS + t / 10, 1.0)
        np.testing.assert_array_equal(mine[1], theirs[1])
        assert mine[2] == theirs[2]
    np.testing.assert_array_equal(policy._time, other._time)


def test_the_first_step_of_every_rollout_needs_none():
    policy = policy_for(LINE)
    policy.act(OBS)
    policy.act(OBS, 1.0)
    policy.act(OBS, done=True)
    policy.act(OBS, 1.0)
    policy.reset()
    assert seen_by(policy, OBS, 7.0)[1][0, 0, 0] == 0.0, "the reward of the rollout before is none of this one"


def test_rows_at_their_first_step():
    policy = policy_for(LINE, num_envs=3)
    obs = np.zeros((3, 2), np.float32)
    policy.act(obs)
    with pytest.raises(ValueError, match=naming("reward", "row 1", "step 1")):
        policy.act(obs, done=[True, False, True])
    _, rl2s, _ = seen_by(policy, obs, [4.0, 5.0, np.nan], [True, False, True])
    assert rl2s[:, 0, 0].tolist() == [0.0, 5.0, 0.0]
    policy.act(obs, done=[True, True, True])
    policy.act(obs, done=True)
    assert seen_by(policy, obs, 1.5)[1][:, 0, 0].tolist() == [1.5] * 3, "one number for all"


@pytest.mark.parametrize(
    ("reward", "done", "named"),
    [
        ([1.0, 2.0], None, ("reward", [1.0, 2.0], 3)),
        ("one", None, ("reward", "'one'", 3)),
        ([1.0, np.inf, 0.0], None, ("reward", "inf", "finite")),
        (0.0, [True, False], ("done", [True, False], 3)),
    ],
)
def test_rewards_that_do_not_fit(reward, done, named):
    policy = policy_for(LINE, num_envs=3)
    policy.act(np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match=naming(*named)) as refused:
        policy.act(np.zeros((3, 2), np.float32), reward, done)
    assert isinstance(refused.value, NonFiniteError) == ("finite" in named)


def test_an_agent_that_hides_rewards_needs_none():
    policy = policy_for(LINE, bindings={"FFTstepEncoder.hide_rl2s": True})
    assert policy.hides_rewards
    for _ in range(3):
        policy.act(OBS)


@pytest.fixture(scope="module", params=tiny.TRAJ)
def agent(request):
    made = tiny.agent(tiny.pendulum(), request.param, max_seq_len=8)
    tiny.config.reset_config()
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
