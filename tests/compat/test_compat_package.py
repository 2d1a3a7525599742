"""Names of the package: version, attributes after ``import amago``, registries."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import gin
import pytest
import torch
from messages import naming

import amago
from amago import cli_utils
from amago.envs.exploration import EpsilonGreedy
from amago.nets.tstep_encoders import FFTstepEncoder

ROOT = Path(__file__).parents[2]


def test_the_version_is_later_than_that_of_the_interface():
    assert amago.__version__ >= "3.4.0"
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'version = { attr = "amago.__version__" }' in settings  # one source: what the package says


def test_the_installed_version_is_that_of_the_package():
    installed = importlib.metadata.version("amago")
    if installed == "0.1.0":
        pytest.skip("this environment was made before the version became 4.0.0: install again")
    assert installed == amago.__version__


def test_attributes_after_import_amago():
    code = """
import amago
for name in ("Experiment", "Agent", "TstepEncoder", "TrajEncoder", "ExplorationWrapper"):
    assert isinstance(getattr(amago, name), type), name
print(amago.utils.AmagoWarning, amago.loading, amago.envs.AMAGOEnv, amago.agent.Agent, amago.hindsight.Timestep, amago.cli_utils.use_config)
print(amago.nets.actor_critic, amago.nets.policy_dists, amago.nets.cnn, amago.nets.ff, amago.nets.goal_embedders, amago.experiment)
print(amago.nets.transformer, amago.nets.traj_encoders, amago.nets.tstep_encoders, amago.nets.utils)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "module", "plural", "names"),
    [
        ("agent", "amago.agent", "agents", {"agent", "multitask"}),
        ("tstep_encoder", "amago.nets.tstep_encoders", "tstep_encoders", {"ff", "cnn"}),
        ("traj_encoder", "amago.nets.traj_encoders", "traj_encoders", {"ff", "rnn", "transformer", "mamba", "identity"}),
        ("exploration", "amago.envs.exploration", "explorations", {"egreedy", "bilevel"}),
    ],
)
def test_registries(kind, module, plural, names):
    where = importlib.import_module(module)
    register, get, listed = (getattr(where, n) for n in (f"register_{kind}", f"get_{kind}_cls", f"list_registered_{plural}"))
    for name in (f"register_{kind}", f"get_{kind}_cls", f"list_registered_{plural}"):
        assert getattr(amago, name) == getattr(where, name)
    assert names <= set(listed())
    assert isinstance(get(sorted(names)[0]), type)
    with pytest.raises(KeyError, match=naming("nothing_of_the_kind", sorted(names)[0])):
        get("nothing_of_the_kind")
    with pytest.raises(ValueError, match=naming(sorted(names)[0], "taken")):
        register(sorted(names)[0])
    with pytest.raises(TypeError, match=f"register_{kind}"):
        register(int)


def test_a_registered_class_is_known_to_scripts():
    @amago.register_tstep_encoder("compat_wide")
    @gin.configurable
    class Wide(FFTstepEncoder):
        pass

    @gin.configurable
    @amago.register_exploration("compat_bold")
    class Bold(EpsilonGreedy):
        pass

    try:
        assert amago.get_tstep_encoder_cls("compat_wide") is Wide
        settings = {}
        assert cli_utils.switch_tstep_encoder(settings, "compat_wide", d_hidden=8) is Wide
        assert cli_utils.switch_exploration(settings, "compat_bold", eps_end=0.3) is Bold
        assert sorted(settings.values()) == [0.3, 8]
        with pytest.raises(ValueError, match=naming("compat_wide", "taken", "Wide")):
            amago.register_tstep_encoder("compat_wide")(Wide)
    finally:
        del cli_utils.TSTEP_ENCODERS["compat_wide"], cli_utils.EXPLORATION["compat_bold"]


def test_the_identity_is_a_sequence_model():
    net = amago.get_traj_encoder_cls("identity")(tstep_dim=5, max_seq_len=9)
    seq = torch.randn(2, 3, 5)
    out, hidden = net(seq=seq, time_idxs=torch.zeros(2, 3, 1, dtype=torch.int64), hidden_state=None)
    assert out.equal(seq)
    assert hidden is None
    assert net.emb_dim == 5
