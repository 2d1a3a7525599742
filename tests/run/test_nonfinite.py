"""NaN and infinity: refused where they enter, harmless where they were put in past that, and never made by training itself."""

import gymnasium as gym
import numpy as np
import pytest
import tiny
import torch
from messages import refused
from store_helpers import stored

from amago.data.trajectory import StoredTraj
from amago.envs import AMAGOEnv, EpsilonGreedy, make_pool
from amago.envs.pool.faults import ActorError
from amago.loading import Batch
from amago.run.learner import MAX_SKIPPED_IN_A_ROW, NonFiniteTraining
from amago.spaces import NonFiniteError, all_finite
from amago.store import TrajectoryWriter

NAN, INF = float("nan"), float("inf")
AutoresetMode = gym.vector.AutoresetMode
EPISODE = 5


class Poisoned(gym.Env):
    """Five steps an episode; "observation", "nested/deep" or "reward" is ``value`` instead of a number ``at`` (episode, step).

    Step 0 is the reset. With ``flag``, a list that is filled when it happens, it does not happen again.
    """

    observation_space = gym.spaces.Dict(
        observation=gym.spaces.Box(-INF, INF, (2, 2), np.float32),
        nested=gym.spaces.Dict(deep=gym.spaces.Box(-INF, INF, (3,), np.float64), pixels=gym.spaces.Box(0, 255, (2,), np.uint8)),
    )
    action_space = gym.spaces.Box(-2.0, 2.0, (2,))

    def __init__(self, poison="", value=NAN, at=(0, 2), flag=None):
        self.poison, self.value, self.at, self.flag = poison, value, at, flag
        self.episode, self.t = -1, 0

    def _now(self, what):
        if self.poison != what or self.at != (self.episode, self.t) or self.flag:
            return False
        if self.flag is not None:
            self.flag.append(self.at)
        return True

    def _obs(self):
        obs = {
            "observation": np.full((2, 2), self.t, np.float32),
            "nested": {"deep": np.full(3, self.t, np.float64), "pixels": np.full(2, self.t, np.uint8)},
        }
        if self._now("observation"):
            obs["observation"][1, 0] = self.value
        if self._now("nested/deep"):
            obs["nested"]["deep"][2] = self.value
        return obs

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), self.value if self._now("reward") else 1.0, self.t == EPISODE, False, {}


def vector(mode, n, poisoned_row, **how):
    makers = [lambda i=i: Poisoned(**how) if i == poisoned_row else Poisoned() for i in range(n)]
    return AMAGOEnv(gym.vector.SyncVectorEnv(makers, autoreset_mode=mode), "many", batched_envs=n)


@pytest.mark.parametrize("poison", ["observation", "nested/deep", "reward"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda m: m.name)
@pytest.mark.parametrize("step", [0, 2, EPISODE], ids=["first", "inside", "last"])
def test_rows_of_a_batch_are_refused_by_number(mode, poison, step):
    if (poison, step) == ("reward", 0):
        return
    env = vector(mode, 3, 1, poison=poison, at=(1, step))
    what = "reward" if poison == "reward" else repr(poison)
    with refused(NonFiniteError, f"many (row 1), step {step}", what, NAN):
        env.reset()
        for _ in range(20):
            env.step(np.zeros((3, 2), np.float32))


def test_final_observations_of_rows_that_did_not_end_mean_nothing():
    """Some vectorised environments leave NaN there."""

    class Batch(gym.Env):
        observation_space, action_space = gym.spaces.Box(-INF, INF, (1,)), gym.spaces.Discrete(2)
        metadata: dict = {"autoreset_mode": "same_step"}
        t = 0

        def reset(self, *, seed=None, options=None):
            return np.zeros((2, 1), np.float32), {}

        def step(self, actions):
            self.t += 1
            ended = np.array([self.t % 3 == 0, False])
            final = np.where(ended[:, None], np.float32(self.t if self.t < 6 else NAN), np.float32(NAN))
            return np.zeros((2, 1), np.float32), np.ones(2), ended, ~ended & False, {"final_obs": final, "_final_obs": ended}

    env = AMAGOEnv(Batch(), "batch", batched_envs=2)
    env.reset()
    for _ in range(5):
        env.step(np.zeros((2, 1), np.int64))
    with refused(NonFiniteError, "batch (row 0), step 3", "'observation'", NAN):
        env.step(np.zeros((2, 1), np.int64))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("wrap", [lambda e: e, EpsilonGreedy], ids=["bare", "exploring"])
def test_actions_are_refused_before_the_environment_or_noise_sees_them(wrap, value):
    env = wrap(AMAGOEnv(Poisoned(), "one"))
    env.reset()
    env.step(np.zeros((1, 2), np.float32))
    with refused(NonFiniteError, "one, step 2", "action[1]", value, [-1, 1]):
        env.step(np.array([[0.0, value]], np.float32))
    assert env.unwrapped.t == 1


@pytest.mark.parametrize("n", [1, 64, 65, 10_000])
def test_all_finite_whatever_the_size(n):
    rng = np.random.default_rng(n)
    for dtype in (np.float16, np.float32, np.float64):
        a = (rng.standard_normal(n) * (float(np.finfo(dtype).max) / 50)).astype(dtype)  # whose sum may overflow
        assert all_finite(a)
        assert all_finite(a.reshape(1, n)[:, ::-1])
        for value in (NAN, INF, -INF):
            b = a.copy()
            b[n // 2] = value
            assert not all_finite(b)
    assert all_finite(np.array([INF, -INF], np.float32)) is False


@pytest.mark.parametrize("mode", ["sync", "already_vectorized"])
def test_the_rollout_is_dropped_the_environment_replaced_and_it_is_counted(mode, tmp_path, caplog):
    flag = []
    fault = {"poison": "reward", "at": (1, 3), "flag": flag}
    makers = [lambda i=i: AMAGOEnv(Poisoned(**fault) if i == 1 else Poisoned(), "one") for i in range(3)]
    if mode == "already_vectorized":
        makers = [lambda: vector(AutoresetMode.SAME_STEP, 3, 1, **fault)]
    recorder = {"save_trajs_to": str(tmp_path / "fifo"), "save_trajs_as": "segments"}
    pool = make_pool(makers, mode, recorder=recorder, seed=1, parallel_actors=3)
    pool.reset()
    for _ in range(4 * EPISODE):
        pool.step(np.zeros((3, 2), np.float32))
        assert all_finite(pool.rl2s)
    stats = pool.drain()
    pool.close()
    assert flag == [(1, 3)]
    rows = 3 if mode == "already_vectorized" else 1
    assert (stats.restarts, stats.dropped) == (1, rows)
    assert "step 3: the reward is nan" in caplog.text
    # the step that was refused opens a new rollout: it and the steps before it are in no trajectory
    ended = {0: 4, 1: 3, 2: 4} if rows == 1 else {0: 3, 1: 3, 2: 3}
    assert {a: sum(e.actor == a for e in stats.episodes) for a in range(3)} == ended
    assert all((e.length, e.ret, e.terminated) == (EPISODE, EPISODE, True) for e in stats.episodes)
    trajs = stored(tmp_path)
    assert len(trajs) == sum(ended.values())
    for t in trajs:
        assert len(t) == EPISODE
        assert all_finite(t.rews)
        assert all(all_finite(v) for v in t.obs.values())


def test_a_policy_of_nan_ends_the_run(tmp_path):
    e = tiny.started(tmp_path, tiny.pendulum, max_env_restarts=3)
    for p in e.policy.actor.parameters():
        p.data.fill_(NAN)
    with refused(ActorError, "max_env_restarts", 3, "NonFiniteError", "Pendulum, step 1", "action", NAN):
        e.learn()


def poisoned(batch, place, value):
    """A copy of a batch with one number replaced in its second sequence."""
    fields = vars(batch) | {"obs": {k: v.clone() for k, v in batch.obs.items()}}
    fields |= {k: fields[k].clone() for k in ("rl2s", "rews", "actions")}
    target = fields["obs"]["observation"] if place == "obs" else fields[place]
    target[1, 2, 0] = value
    return Batch(**fields)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory):
    """Rollouts of Pendulum on disk."""
    root = tmp_path_factory.mktemp("buffer")
    tiny.learned(root, tiny.pendulum, start_learning_at_epoch=9, train_timesteps_per_epoch=20).close()
    return root


def trainer(root, traj="ff", make_env=tiny.pendulum, **fields):
    e = tiny.started(root, make_env, traj, start_collecting_at_epoch=INF, resume="auto", **fields)
    e.policy.train()
    return e


@pytest.mark.parametrize(
    ("place", "value"),
    [("obs", NAN), ("rl2s", NAN), ("rews", NAN), ("rews", INF), ("actions", NAN), ("obs", INF), ("actions", INF)],
)
def test_an_update_on_a_poisoned_batch_is_skipped_bit_for_bit(buffer, place, value):
    e = trainer(buffer, "transformer")
    good = e.train_dloader.draw(0)
    e.train_step(good, log_step=False)
    before, moments = tiny.weights(e), [{k: v.clone() for k, v in s.items()} for s in e.optimizer.state.values()]
    skipped = e.train_step(poisoned(good, place, value), log_step=True)["Skipped Updates"]
    if value != INF or place == "rews":  # other infinite numbers may be clamped
        assert (skipped, e.learner.grad_steps) == (1.0, 1)
        trained = {name for name, _ in e.policy.named_parameters()}
        assert not trained & set(tiny.differing(before, tiny.weights(e))), "targets included"
        for state, kept in zip(e.optimizer.state.values(), moments, strict=True):
            assert all(state[k].equal(kept[k]) for k in kept)
    assert all(v.isfinite().all() for v in tiny.weights(e).values() if v.is_floating_point())
    e.train_step(good, log_step=False)
    assert e.learner.grad_steps == 2 + (skipped == 0)


def test_a_store_written_by_hand_stops_the_run_after_so_many_updates(tmp_path):
    """Nobody has looked at these files but the training."""
    env = tiny.pendulum()
    spaces = env.action_spec.space, env.observation_space
    with TrajectoryWriter(
        tmp_path / "run" / "buffer" / "fifo", writer="hand", action_space=spaces[0], obs_space=spaces[1]
    ) as w:
        for _ in range(4):
            rews = np.full((6, 1), NAN, np.float32)
            w.write(StoredTraj({"observation": np.zeros((7, 3), np.float32)}, np.zeros((6, 1), np.float32), rews, rews > 0))
    e = trainer(tmp_path, train_batches_per_epoch=2 * MAX_SKIPPED_IN_A_ROW, ckpt_interval=1)
    before = [p.detach().clone() for p in e.policy.trainable_params]
    with refused(NonFiniteTraining, 20):
        e.learn()
    assert all(p.equal(q) for p, q in zip(e.policy.trainable_params, before, strict=True))
    assert (e.learner.skipped, e.learner.grad_steps) == (MAX_SKIPPED_IN_A_ROW, 0)


UPDATES = 120


@pytest.mark.parametrize(
    ("kind", "traj", "precision"), [("huge", "ff", "no"), ("constant", "ff", "no"), ("huge", "transformer", "bf16")]
)
def test_hundreds_of_updates_stay_finite(buffer, kind, traj, precision):
    """Rewards of +-1e8; constant observations and no reward."""
    e = trainer(buffer, traj, lr_warmup_steps=50, learning_rate=1e-3, mixed_precision=precision, log_interval=1)
    rng = torch.Generator().manual_seed(0)
    before = e.grad_update_counter
    for n in range(UPDATES):
        batch = e.train_dloader.draw(n)
        fields = vars(batch) | {"rl2s": batch.rl2s.clone(), "rews": torch.zeros_like(batch.rews)}
        if kind == "huge":
            fields["rews"] = (torch.rand(batch.rews.shape, generator=rng) - 0.5).sign() * 1e8
        else:
            fields["obs"] = {"observation": torch.full_like(batch.obs["observation"], 7.5)}
        fields["rl2s"][:, 1:, :1] = fields["rews"]
        metrics = e.train_step(Batch(**fields), log_step=n % 20 == 0)
        assert not {k: v for k, v in metrics.items() if not torch.as_tensor(v).isfinite()}, f"update {n}"
    assert (e.grad_update_counter - before, e.learner.skipped) == (UPDATES, 0)
    assert all(v.isfinite().all() for v in tiny.weights(e).values() if v.is_floating_point())
    assert all(v.isfinite().all() for state in e.optimizer.state.values() for v in state.values())
