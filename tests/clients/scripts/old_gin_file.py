"""Settings in a gin file that imports modules and names parts as the original does (M, A)."""

import sys
from pathlib import Path

import gin
from small import experiment, run

import amago
from amago.cli_utils import use_config

GIN = """
import amago.agent
import amago.experiment
import amago.nets.actor_critic
import amago.nets.policy_dists
import amago.nets.traj_encoders
import amago.nets.transformer
import amago.nets.tstep_encoders

MultiTaskAgent.reward_multiplier = 10.
MultiTaskAgent.critic_loss_weight = 5.
agent.MultiTaskAgent.num_critics = 4
amago.agent.MultiTaskAgent.fbc_filter_func = @agent.leaky_relu_filter
agent.leaky_relu_filter.beta = 2.
leaky_relu_filter.tau = 1e-2
exp_filter.clip_weights_high = 50.
MultiTaskAgent.actor_type = @actor_critic.ResidualActor
MultiTaskAgent.critic_type = @actor_critic.NCriticsTwoHot
actor_critic.ResidualActor.feature_dim = 16
actor_critic.ResidualActor.residual_ff_dim = 32
actor_critic.ResidualActor.residual_blocks = 1
actor_critic.ResidualActor.discrete_dist_type = @policy_dists.Discrete
policy_dists.Discrete.clip_prob_low = 0.002
actor_critic.NCriticsTwoHot.d_hidden = 16
actor_critic.NCriticsTwoHot.output_bins = 16
NCriticsTwoHot.label_type = "hlgauss"
NCriticsTwoHot.sigma = 0.75
NCriticsTwoHot.min_return = -100
NCriticsTwoHot.max_return = 100
traj_encoders.TformerTrajEncoder.n_layers = 1
traj_encoders.TformerTrajEncoder.d_model = 16
traj_encoders.TformerTrajEncoder.n_heads = 2
traj_encoders.TformerTrajEncoder.d_ff = 32
traj_encoders.TformerTrajEncoder.attention_type = @transformer.VanillaAttention
tstep_encoders.FFTstepEncoder.d_hidden = 16
tstep_encoders.FFTstepEncoder.d_output = 16
tstep_encoders.FFTstepEncoder.hide_rl2s = False
amago.nets.utils.InputNorm.beta = 1e-3
Multigammas.discrete = [0.9]
EpsilonGreedy.steps_anneal = 100
amago.experiment.Experiment.learning_rate = 3e-4
Experiment.l2_coeff = 1e-4
DiskTrajDataset.dset_min_size = 1
"""

if __name__ == "__main__":
    gin.clear_config()
    path = Path(sys.argv[1]) / "settings.gin"
    path.write_text(GIN)
    use_config({"MultiTaskAgent.tau": 0.004}, [str(path)], finalize=True)
    exp = run(experiment())
    policy = exp.policy
    assert (
        policy.reward_multiplier == 10.0
        and policy.critic_loss_weight == 5.0
        and policy.tau == 0.004
        and exp.learning_rate == 3e-4
    )
    assert isinstance(policy.actor, amago.nets.actor_critic.ResidualActor)
    assert policy.critics.label_type == "hlgauss" and policy.critics.sigma == 0.75
    assert policy.actor.policy_dist.clip_prob_low == 0.002 and len(policy.gammas) == 2
    assert policy.fbc_filter_func is not None
    gin.clear_config()
