"""A loaded policy acts as the trained agent did, and nothing is run that the caller did not allow."""

import json
import sys

import gin
import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import check_refused, naming
from run_inside import run_amago
from tiny import learned

import amago
from amago import config
from amago.envs import make_pool
from amago.nets.actor_critic import ResidualActor
from amago.nets.tstep_encoders import FFTstepEncoder
from amago.relabeling import NoOpRelabeler
from amago.run.checkpoint import CheckpointError
from amago.run.rollout import Rollout

ACTORS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by name, made when first asked for."""
    root, made = tmp_path_factory.mktemp("policies"), {}

    def get(make_env, traj):
        name = f"{make_env.__name__}-{traj}"
        if name not in made:
            config.clear()
            e = learned(
                root, make_env, traj, name=name, max_seq_len=10, train_timesteps_per_epoch=35, ckpt_interval=1,
                always_save_latest=True,
            )  # fmt: skip
            made[name] = e.run_dir, e.policy
            e.close()
            config.clear()
        return made[name]

    return get


@pytest.fixture
def run(runs):
    return runs(tiny.cartpole, "transformer")


def test_without_latest_weights_the_newest_training_state_is_taken(tmp_path):
    e = learned(tmp_path, ckpt_interval=1, epochs=2)
    loaded = amago.load_policy(e.run_dir).agent.state_dict()
    assert not tiny.differing(tiny.weights(e), dict(loaded))
    state = e.ckpt_dir / "training_states" / "run_epoch_1" / "model.safetensors"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    with pytest.raises(CheckpointError, match=naming("run_epoch_1/model.safetensors")):
        amago.load_policy(state.parent)


def test_what_is_no_run(tmp_path, run):
    check_refused(
        CheckpointError,
        (naming(str(tmp_path), "policy.json"), lambda: amago.load_policy(tmp_path)),
        (naming(str(tmp_path / "nowhere"), "policy.json"), lambda: amago.load_policy(tmp_path / "nowhere")),
        (
            naming(str(run[0] / "ckpts" / "policy_weights" / "policy_epoch_77.pt")),
            lambda: amago.load_policy(run[0] / "ckpts" / "policy_weights" / "policy_epoch_77.pt"),
        ),
        (
            naming(str(run[0] / "ckpts" / "training_states"), "model.safetensors"),
            lambda: amago.load_policy(run[0] / "ckpts" / "training_states"),
        ),
    )


def test_bindings_of_the_loading_process_are_left_alone_and_not_used(run):
    config.bind({"FFTstepEncoder.d_output": 99, "Agent.num_critics": 3})
    gin.parse_config("Actor.d_hidden = 7")
    before = config.bindings()
    policy = amago.load_policy(run[0])
    assert policy.agent.tstep_encoder.emb_dim == 12
    assert policy.agent.critics.state_dict().keys() == run[1].critics.state_dict().keys()
    assert config.bindings() == before


def test_bindings_survive_a_failing_load(run, tmp_path):
    config.bind({"FFTstepEncoder.d_output": 99})
    broken = tmp_path / "broken"
    broken.mkdir()
    spec = json.loads((run[0] / "policy.json").read_text())
    (broken / "policy.json").write_text(json.dumps(spec | {"bindings": {"amago.agent.Agent.num_critics": -1}}))
    torch.save({}, broken / "w.pt")
    with pytest.raises(ValueError, match="num_critics"):
        amago.load_policy(broken / "w.pt")
    assert list(config.bindings().values()) == [99]


REPLAY = """
import json, sys
blocked = json.loads(sys.argv[2])
sys.modules.update(dict.fromkeys(blocked))  # importing one of them fails
import numpy as np, torch, amago
from amago import config

for name, run_dir in json.loads(sys.argv[1]).items():
    log = np.load(f"{run_dir}/lived.npz", allow_pickle=False)
    obs = {k[4:]: v for k, v in log.items() if k.startswith("obs ")}
    policy = amago.load_policy(run_dir, num_envs=3)
    torch.manual_seed(5)
    equal = 0
    for t, action in enumerate(log["actions"]):
        mine = policy.act({k: v[t] for k, v in obs.items()}, log["rewards"][t], log["resets"][t])
        equal += bool((mine == action).all() and mine.dtype == action.dtype)
    print(name, equal, len(log["actions"]))
assert not config.bindings()
assert not [m for m in blocked if sys.modules[m] is not None]
print(sorted(m for m in sys.modules if m.split(".")[0] in ("accelerate", "wandb", "tensorboard", "tiny") and m not in blocked))
"""
BLOCKED = (
    "accelerate", "wandb", "tensorboard", "torch.utils.tensorboard", "matplotlib", "pygame", "tqdm", "amago.envs",
    "amago.experiment", "amago.run.rollout", "gymnasium.envs.classic_control", "tiny",
)  # fmt: skip


def live(agent, make_env, steps):
    """What the training process's own loop saw and did, sampling actions; the actions in the environment's terms."""
    pool = make_pool([make_env] * ACTORS, env_mode="sync", seed=3)
    pool.reset()
    act, log = agent.get_actions, []

    def noted(obs, rl2s, *rest):
        seen = {f"obs {k}": v.numpy().copy() for k, v in obs.items()}
        seen |= {"rewards": rl2s[:, 0].numpy().copy(), "resets": pool.resets.copy()}
        stored, memory = act(obs, rl2s, *rest)
        log.append(seen | {"actions": pool.action_spec.to_env(stored.numpy())})
        return stored, memory

    agent.get_actions = noted
    try:
        torch.manual_seed(5)
        Rollout(pool).run(agent, steps)
    finally:
        del agent.get_actions
        pool.close()
    return {k: np.stack([step[k] for step in log]) for k in log[0]}


def test_hundreds_of_steps_on_a_machine_with_nothing_of_the_training_process(runs):
    kinds = [(tiny.cartpole, traj, 400) for traj in ("ff", "gru", "transformer")]
    kinds += [(tiny.pendulum, "gru", 400), (tiny.bits, "transformer", 400)]
    places, expected = {}, []
    for make_env, traj, steps in kinds:
        run_dir, agent = runs(make_env, traj)
        log = live(agent, make_env, steps)
        assert (log["resets"].sum(0) > 10).all(), "many episodes"
        lengths = np.diff(np.flatnonzero(log["resets"][:, 0]))
        assert (lengths > agent.max_seq_len).any() or make_env is not tiny.cartpole, "past the context"
        np.savez(run_dir / "lived.npz", **log)
        places[run_dir.name] = str(run_dir)
        expected.append(f"{run_dir.name} {steps} {steps}")
    *counts, left = tiny.run_program(REPLAY, json.dumps(places), json.dumps(BLOCKED)).splitlines()
    assert counts == expected
    assert left == "[]"


@pytest.fixture
def decided(tmp_path):
    """A started run on CartPole whose policies (of discounts 0.9 and 0.999) take actions 0 and 1, and published them."""
    e = tiny.started(tmp_path, tiny.cartpole, max_seq_len=10, train_timesteps_per_epoch=35, sample_actions=False)
    actor = e.policy.actor.base.out_layer
    with torch.no_grad():
        actor.weight.zero_()
        actor.bias.copy_(torch.eye(2).flatten() * 20.0)
    e.write_latest_policy()
    return e


@pytest.mark.parametrize(("gamma", "action"), [(None, 1), (0.999, 1), (0.9, 0)])
def test_the_discount_that_acts(decided, gamma, action):
    policy = amago.load_policy(decided.run_dir, sample=False, num_envs=2, gamma=gamma)
    assert policy.gammas == (0.9, 0.999)
    assert policy.gamma == (gamma or 0.999)
    assert policy.act(np.zeros((2, 4), np.float32)).tolist() == [action] * 2


@pytest.mark.parametrize(("idx", "gamma"), [(0, 0.9), (1, 0.999), (-2, 0.9)])
def test_the_discount_of_rollouts_is_part_of_what_is_loaded(tmp_path, idx, gamma):
    config.bind({"Agent.rollout_gamma_idx": idx})
    e = learned(tmp_path, tiny.cartpole, max_seq_len=10, train_timesteps_per_epoch=35, always_save_latest=True)
    assert e.policy.rollout_gamma_idx == idx
    config.clear()
    assert amago.load_policy(e.run_dir).gamma == gamma
    assert amago.load_policy(e.run_dir, gamma=0.999).gamma == 0.999


@pytest.mark.parametrize("gamma", [0.95, 1.0, -1])
def test_a_discount_that_the_agent_does_not_have(decided, gamma):
    message = naming(f"gamma={gamma}", "Agent", "0.9, 0.999")
    with pytest.raises(ValueError, match=message):
        amago.load_policy(decided.run_dir, gamma=gamma)
    made = []
    with pytest.raises(ValueError, match=message):
        decided.evaluate_test(lambda: made.append(1) or tiny.cartpole(), timesteps=5, gamma=gamma)
    assert not made, "it is refused before any actor starts"
    done = run_amago(["eval", str(decided.run_dir), "--env", "CartPole-v1", "--gamma", str(gamma)], decided.run_dir)
    assert done.code == 2
    assert f"gamma={float(gamma)}" in done.text


def test_an_evaluation_by_another_discount(decided, registered):
    taken = []

    class Witness(gym.Wrapper):
        def step(self, action):
            taken.append(int(action))
            return super().step(action)

    def witnessed_cartpole():
        return amago.envs.AMAGOEnv(Witness(gym.make("CartPole-v1", max_episode_steps=30)), env_name="CartPole")

    for gamma, action in ((0.9, 0), (0.999, 1), (None, 1)):
        taken.clear()
        assert decided.evaluate_test(witnessed_cartpole, timesteps=40, gamma=gamma)["Number of Rollouts"] > 1
        assert set(taken) == {action}
        assert decided.policy.rollout_gamma_idx == -1, "rollouts go on as before"
    taken.clear()
    registered("Witness-v0", lambda **_: Witness(gym.make("CartPole-v1")), max_episode_steps=30)
    options = "--env Witness-v0 --episodes 2 --actors 2 --greedy --gamma 0.9"
    assert run_amago(["eval", str(decided.run_dir), *options.split()], decided.run_dir).code == 0
    assert set(taken) == {0}


OWN = """
import gin, torch, pathlib
from amago.nets.tstep_encoders import TstepEncoder
pathlib.Path(__file__).with_name("imported").touch()

@gin.configurable
class OwnEncoder(TstepEncoder):
    def __init__(self, obs_space, rl2_space, width=5):
        super().__init__(obs_space, rl2_space)
        self.linear = torch.nn.Linear(4 + rl2_space.shape[0], width)

    @property
    def emb_dim(self):
        return self.linear.out_features

    def inner_forward(self, obs, rl2s, log_dict=None):
        return self.linear(torch.cat((obs["observation"], rl2s), -1))
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A run whose encoder comes from a module that this process has forgotten again."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "own_encoder.py").write_text(OWN)
    monkeypatch.syspath_prepend(package)
    gin.enter_interactive_mode()  # the module is imported several times in this process
    import own_encoder

    config.bind({"OwnEncoder.width": 6})
    e = learned(tmp_path, tiny.cartpole, tstep_encoder_type=own_encoder.OwnEncoder, max_seq_len=10, train_timesteps_per_epoch=35, always_save_latest=True)  # fmt: skip
    e.close()
    config.clear()
    (package / "imported").unlink()
    del sys.modules["own_encoder"]
    yield e.run_dir, package / "imported"
    sys.modules.pop("own_encoder", None)
    gin.exit_interactive_mode()


def test_a_class_of_ones_own_is_refused_unless_allowed(own_module):
    run_dir, imported = own_module
    with pytest.raises(ValueError, match=naming("own_encoder:OwnEncoder", "modules=['own_encoder']")):
        amago.load_policy(run_dir)
    assert not imported.exists()
    policy = amago.load_policy(run_dir, modules=["own_encoder"])
    assert imported.exists()
    assert policy.agent.tstep_encoder.emb_dim == 6
    policy.act(np.zeros(4, np.float32))


def test_a_class_of_ones_own_that_is_imported(own_module):
    import own_encoder

    policy = amago.load_policy(own_module[0])
    assert isinstance(policy.agent.tstep_encoder, own_encoder.OwnEncoder)
    assert policy.agent.tstep_encoder.emb_dim == 6


@pytest.mark.parametrize(
    ("part", "name", "named"),
    [
        ("agent", "os:system", ("agent", "BaseAgent")),
        ("tstep_encoder", "subprocess:Popen", ("tstep_encoder", "TstepEncoder")),
        ("traj_encoder", "builtins:exec", ("traj_encoder", "TrajEncoder")),
        ("traj_encoder", "amago.nets.traj_encoders:Gone", ()),
        ("tstep_encoder", "__main__:Mine", ()),
        ("agent", "antigravity:geohash", ("modules=",)),
    ],
)
def test_a_description_can_name_nothing_but_parts_of_a_policy(run, tmp_path, part, name, named):
    spec = json.loads((run[0] / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps(spec | {part: name}))
    torch.save({}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=naming(name, *named)):
        amago.load_policy(tmp_path / "w.pt")
    assert "antigravity" not in sys.modules


def test_settings_of_every_kind_are_written_and_read(tmp_path):
    """Those that cannot be written too, where they have nothing to do with a policy."""
    from amago.agent import exp_filter

    config.bind({
        "Agent.fbc_filter_func": exp_filter, "FFTstepEncoder.specify_obs_keys": ["observation"], "Agent.popart": False,
        "Agent.actor_type": ResidualActor, "DiskTrajDataset.relabeler": NoOpRelabeler(), "EpsilonGreedy.eps_start": 0.5,
    })  # fmt: skip
    e = tiny.experiment(tmp_path, tiny.pendulum, train_timesteps_per_epoch=11, max_seq_len=5, always_save_latest=True)
    config.bind({"Multigammas.continuous": (0.5, 0.7)})
    e.start()
    e.learn()
    config.clear()
    agent = amago.load_policy(e.run_dir).agent
    assert agent.fbc_filter_func is exp_filter
    assert isinstance(agent.actor, ResidualActor)
    assert agent.gammas.tolist() == pytest.approx([0.5, 0.7, 0.999])
    assert isinstance(agent.tstep_encoder, FFTstepEncoder)


def test_a_setting_that_cannot_be_written_is_refused(tmp_path):
    config.bind({"Agent.fbc_filter_func": lambda adv: adv.sign()})
    with pytest.raises(ValueError, match=naming("Agent.fbc_filter_func", "<lambda>")):
        tiny.started(tmp_path)
