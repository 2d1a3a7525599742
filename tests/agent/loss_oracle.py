"""The losses of actor-critic agents, transition by transition in float64, written from the published formulas.

Nothing of the library is used but its parameters, and the encoders' states. Each sample is one vector, each network one matrix
product after the other. The gradient follows from PyTorch's own rules; `Tensor.detach` stands where the algorithm stops it.

A policy's draws (noise of samples, critics of a target) are arguments. Letters: b sequence, t time, g discount, c critic, k sample.
"""

import math
from dataclasses import dataclass, field

import torch


def symlog(x):
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x):
    return torch.sign(x) * torch.expm1(torch.abs(x))


def leaky(x):
    return torch.where(x > 0, x, 0.01 * x)


@dataclass
class Draws:
    """What was random, in the order of drawing: one entry for each k of the actor's loss, then for each k of the target; and the indices
    of a target's critics."""

    noise: list = field(default_factory=list)
    critics: list = field(default_factory=list)


@dataclass
class Oracle:
    """An agent's parameters and settings.

    Attributes:
        params, target_params: actor's and critics', by the names ``actor.*`` and ``critics.*``.
        kind: of actions. exact: discrete actions, valued by expectation.
        bins: centres of two-hot critics, in symlog(return); None: scalar critics.
        popart: mu, nu, w, b, t, each (G,); the statistics before the update.
        temperature: weights (G,) of the entropy; None: it has none.
    """

    params: dict
    target_params: dict
    kind: str
    exact: bool
    gammas: list
    num_critics: int
    online: float
    offline: float
    reward_multiplier: float
    n_step: int
    weight: object
    popart: dict
    beta: float = 5e-4
    bins: torch.Tensor | None = None
    num_actions: int = 4
    targets: str = "n_step"
    trace_lambda: float = 0.95
    temperature: list | None = None

    def policy_vector(self, params, s):
        """Parameters (G, P) of the policies at a state (D,)."""
        x = leaky(params["actor.base.in_layer.weight"] @ s + params["actor.base.in_layer.bias"])
        n = 0
        while f"actor.base.layers.{n}.weight" in params:
            x = leaky(params[f"actor.base.layers.{n}.weight"] @ x + params[f"actor.base.layers.{n}.bias"])
            n += 1
        x = params["actor.base.out_layer.weight"] @ x + params["actor.base.out_layer.bias"]
        return x.reshape(len(self.gammas), -1)

    def critic(self, params, c, x):
        """The output of critic c for its input vector."""
        layers = ["inp_layer"]
        while f"critics.net.core_layers.{len(layers) - 1}.weight" in params:
            layers.append(f"core_layers.{len(layers) - 1}")
        for n, name in enumerate(layers):
            x = x @ params[f"critics.net.{name}.weight"][c] + params[f"critics.net.{name}.bias"][0, 0, c]
            if f"critics.net.norms.{n}.bias" in params:
                x = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
                x = x * params[f"critics.net.norms.{n}.weight"][c, 0] + params[f"critics.net.norms.{n}.bias"][c, 0]
            x = leaky(x)
        return x @ params["critics.net.output_layer.weight"][c] + params["critics.net.output_layer.bias"][0, 0, c]

    def q(self, params, c, g, s, a):
        """Output (O,) of critic c for discount g at a state and an action vector."""
        if self.exact:
            values = self.critic(params, c, s).reshape(len(self.gammas), -1)[g]
            return (values * a).sum()[None]
        horizon = symlog(1.0 / torch.clamp(1.0 - torch.tensor(self.gammas[g]), 1e-6, 1.0))[None]
        return self.critic(params, c, torch.cat((s, horizon, a + (a.clamp(-0.999, 0.999) - a).detach())))

    def clip(self, p):
        p = p.clamp(0.001, 0.99)
        return p / p.sum().detach()

    def probs(self, vec):
        return self.clip(torch.exp(vec) / torch.exp(vec).sum())

    def gaussian(self, vec):
        loc, raw = vec[: len(vec) // 2], vec[len(vec) // 2 :]
        return loc, torch.exp(-5.0 + 0.5 * (2.0 + 5.0) * (torch.tanh(raw) + 1.0))

    def sample(self, vec, noise):
        """An action vector, with its gradient."""
        if self.exact:
            return self.probs(vec)
        if self.kind == "continuous":
            loc, std = self.gaussian(vec)
            return torch.tanh(loc + std * noise)
        if self.kind == "multibinary":
            p = 1.0 / (1.0 + torch.exp(-vec))
            return noise + p - p.detach()
        scores = torch.log(self.probs(vec)) - torch.log(noise)  # noise is exponential, so that -log of it is Gumbel
        hard = torch.zeros_like(scores)
        hard[scores.argmax()] = 1.0
        soft = torch.exp(scores / 0.5) / torch.exp(scores / 0.5).sum()
        return self.clip(hard) + soft - soft.detach()

    def log_prob(self, vec, a):
        """Of the loss: over bits the mean."""
        return self.log_prob_of_action(vec, a) / (len(a) if self.kind == "multibinary" else 1)

    def log_prob_of_action(self, vec, a):
        if self.kind == "discrete":
            return torch.log(self.probs(vec)[a.argmax()])
        if self.kind == "multibinary":
            p = 1.0 / (1.0 + torch.exp(-vec))
            return torch.log(torch.where(a > 0.5, p, 1.0 - p)).sum()
        (loc, std), a = self.gaussian(vec), a.clamp(-0.99, 0.99)
        x = 0.5 * torch.log((1.0 + a) / (1.0 - a))
        normal = -0.5 * ((x - loc) / std) ** 2 - torch.log(std) - 0.5 * math.log(2.0 * math.pi)
        return (normal - torch.log(1.0 - a**2)).sum()

    def entropy(self, vec, noises):
        """Of choices and bits by its definition; of numbers minus the log-density of the samples, by their values before tanh."""
        if self.kind == "discrete":
            p = self.probs(vec)
            return -(p * torch.log(p)).sum()
        if self.kind == "multibinary":
            p = 1.0 / (1.0 + torch.exp(-vec))
            return -(p * torch.log(p) + (1.0 - p) * torch.log(1.0 - p)).sum()
        (loc, std), total = self.gaussian(vec), 0.0
        for noise in noises:
            x = loc + std * noise
            normal = torch.exp(-0.5 * ((x - loc) / std) ** 2) / (std * math.sqrt(2.0 * math.pi))
            total = total - torch.log(normal / (1.0 - torch.tanh(x) ** 2)).sum()
        return total / len(noises)

    def bonus(self, vec, g, noises):
        """What a state is worth by the entropy of its policy."""
        return 0.0 if self.temperature is None else self.temperature[g] * self.entropy(vec, noises)

    def value(self, out):
        """The quantity that is averaged and compared: raw outputs, or decoded distributions."""
        if self.bins is None:
            return out[0]
        p = torch.exp(out) / torch.exp(out).sum()
        return symexp((p * self.bins).sum())

    def label(self, y):
        """The two-hot label (O,) of a return: the weights of its neighbours give the return back when they are decoded."""
        values, x = self.bins, symlog(y)
        x = x.clamp(values[0], values[-1])
        high = 1
        while high < len(values) - 1 and values[high] <= x:
            high += 1
        out = torch.zeros_like(values)
        out[high] = (x - values[high - 1]) / (values[high] - values[high - 1])
        out[high - 1] = 1.0 - out[high]
        return out

    def sigma(self, g):
        return torch.sqrt(torch.clamp(self.popart["nu"][g] - self.popart["mu"][g] ** 2, 1e-4, 1e8)).clamp(1e-4, 1e6)

    def normalized(self, x, g):
        return self.popart["w"][g] * x + self.popart["b"][g]

    def target(self, data, b, t, draws):
        """y (G,): up to n rewards, until the rollout terminates or the real data end."""
        if self.targets != "n_step":
            return torch.stack([self.trace_target(data, b, t, g, draws) for g in range(len(self.gammas))])
        out = []
        for g, gamma in enumerate(self.gammas):
            total, discount, now = torch.zeros(()), 1.0, t
            for _ in range(self.n_step):
                total = total + discount * self.reward_multiplier * data.rews[b, now, 0]
                discount = discount * gamma * (1.0 - float(data.dones[b, now, 0]))
                now += 1
                if discount == 0.0:
                    break
                vec = self.policy_vector(self.target_params, data.states[b, now].detach())[g]
                total = total + discount * self.bonus(vec, g, [e[b, now - 1, g] for e in draws.noise])
                if now == data.lengths[b]:
                    break
            out.append(total + discount * self.reduced(self.values(data, b, now, g, draws)[0]))
        return torch.stack(out)

    def trace_target(self, data, b, t, g, draws):
        """y by its definition, the rest of the sequence first."""
        reward = self.reward_multiplier * data.rews[b, t, 0]
        if data.dones[b, t, 0]:
            return reward
        values, vec = self.values(data, b, t + 1, g, draws)
        v = self.reduced(values)
        bonus = self.bonus(vec, g, [e[b, t, g] for e in draws.noise])
        if t + 1 == data.lengths[b]:
            return reward + self.gammas[g] * (v + bonus)
        later = self.trace_target(data, b, t + 1, g, draws)
        s, a = data.states[b, t + 1].detach(), data.actions[b, t + 1]
        stored = self.clip(a) if self.kind == "discrete" else a.clamp(-1, 1)
        of_taken = [self.in_returns(self.value(self.q(self.target_params, c, g, s, stored)), g) for c in draws.critics]
        q = of_taken[values.index(min(values))] if self.online > 0 else sum(of_taken) / len(of_taken)
        pi = torch.exp(self.log_prob_of_action(vec, a))
        return reward + self.gammas[g] * (v + bonus + self.trace_lambda * pi * (later - q))

    def reduced(self, values):
        return torch.stack(values).min() if self.online > 0 else sum(values) / len(values)

    def in_returns(self, value, g):
        return value if self.bins is not None else self.sigma(g) * self.normalized(value, g) + self.popart["mu"][g]

    def values(self, data, b, t, g, draws):
        """Those of the critics of a target, of the state at time t, which is row t - 1 of what was drawn for next states; and the
        policy there."""
        s, values = data.states[b, t].detach(), []
        vec = self.policy_vector(self.target_params, s)[g]
        for c in draws.critics:
            samples = [self.value(self.q(self.target_params, c, g, s, self.sample(vec, e[b, t - 1, g]))) for e in draws.noise]
            values.append(self.in_returns(sum(samples) / len(samples), g))
        return values, vec

    def update_popart(self, targets):
        """``targets``: {(b, t): (G,)} of all real transitions."""
        new = {k: v.clone() for k, v in self.popart.items()}
        for g in range(len(self.gammas)):
            y = torch.stack([v[g] for v in targets.values()])
            new["t"][g] += 1
            rate = self.beta / (1.0 - (1.0 - self.beta) ** new["t"][g])
            new["mu"][g] = (1.0 - rate) * self.popart["mu"][g] + rate * y.mean()
            new["nu"][g] = (1.0 - rate) * self.popart["nu"][g] + rate * (y**2).mean()
        old = [self.sigma(g) for g in range(len(self.gammas))]
        before, self.popart = self.popart, new
        for g in range(len(self.gammas)):
            new["w"][g] = before["w"][g] * old[g] / self.sigma(g)
            new["b"][g] = (old[g] * before["b"][g] + before["mu"][g] - new["mu"][g]) / self.sigma(g)

    def losses(self, data, draws_pi, draws_next):
        """Mean losses of actor and critics over the real transitions."""
        real = [(b, t) for b, n in enumerate(data.lengths) for t in range(n)]
        with torch.no_grad():
            targets = {(b, t): self.target(data, b, t, draws_next) for b, t in real}
            self.update_popart(targets)
        held = {k: v.detach() for k, v in self.params.items()}
        actor, critic, C = [], [], range(self.num_critics)
        for b, t in real:
            s, a = data.states[b, t], data.actions[b, t]
            policies = self.policy_vector(self.params, s)
            stored = self.clip(a) if self.kind == "discrete" else a.clamp(-1, 1)
            for g in range(len(self.gammas)):
                y, vec = targets[b, t][g], policies[g]
                outs = [self.q(self.params, c, g, s, stored) for c in C]
                critic += [self.critic_loss(out, y, g) for out in outs]
                chosen = [self.sample(vec, e[b, t, g]) for e in draws_pi.noise]
                values = [sum(self.value(self.q(held, c, g, s.detach(), x)) for x in chosen) / len(chosen) for c in C]
                advantage = sum(self.value(outs[c]) - values[c] for c in C) / self.num_critics
                loss = -self.offline * self.weight(advantage.detach()) * self.log_prob(vec, a)
                if self.online > 0:
                    soft = self.bonus(vec, g, [e[b, t, g] for e in draws_pi.noise]) / self.sigma(g)
                    loss = loss - self.online * (torch.stack([self.objective(v, g) for v in values]).min() + soft)
                actor.append(loss)
        return sum(actor) / len(actor), sum(critic) / len(critic)

    def objective(self, value, g):
        if self.bins is None:
            return self.normalized(value, g)
        return (value - self.popart["mu"][g]) / self.sigma(g)

    def critic_loss(self, out, y, g):
        if self.bins is None:
            return (self.normalized(out[0], g) - (y - self.popart["mu"][g]) / self.sigma(g)) ** 2
        return -(self.label(y) * (out - torch.log(torch.exp(out).sum()))).sum()
