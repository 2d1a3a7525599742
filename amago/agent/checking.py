"""`check_tstep_encoder` and `check_traj_encoder`: whether the parts of an agent keep the contracts of their base classes.

Shapes: B sequences or actors, L timesteps, D numbers of a timestep's input, E of its output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amago.agent.export_checking import check_export
from amago.data.findings import Findings, StopChecking
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.spaces import action_spec, rl2_space, spaces_of

TOLERANCE = 1e-3
"""Largest difference, relative to the size of the output, between two ways to the same output: much more than rounding in float32."""
_STEPS = 8  # of a rollout


@contextmanager
def _checking(what: str, seed: int) -> Iterator[Findings]:
    """Findings that are raised at the end of the block, in which random numbers are seeded, and restored afterwards."""
    findings = Findings(what)
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` also seeds GPUs that are not in use yet
        with suppress(StopChecking):
            yield findings
    findings.finish()


def _built(part: Any, base: type[nn.Module], findings: Findings, **arguments: Any) -> Any:
    """An encoder on which to try things: made by the class or function ``part``, or a copy of it if it is one already."""
    if isinstance(part, base):
        return copy.deepcopy(part).eval()
    if not callable(part):
        raise TypeError(f"{part!r} must be a subclass of {base.__name__}, a function that makes one, or one")
    name = getattr(part, "__name__", repr(part))
    made = None
    with findings.attempt(f"{name}({', '.join(arguments)})"):
        made = part(**arguments)
    if findings:
        raise StopChecking
    if not isinstance(made, base):
        findings.add(f"{name} made a {type(made).__name__}, but must make a subclass of amago.{base.__name__}")
        raise StopChecking
    return made.eval()


def _width(encoder: Any, findings: Findings) -> int:
    """E."""
    with findings.attempt("emb_dim"):
        width = encoder.emb_dim
        if isinstance(width, int) and width >= 1:
            return width
        findings.add(f"emb_dim is {width!r}, but must be the number of outputs of a timestep, at least 1")
    raise StopChecking


def _check_output(out: Any, shape: tuple[int, ...], doing: str, findings: Findings) -> None:
    """An output must be a tensor of real numbers of this shape; stop if it is not."""
    if not isinstance(out, Tensor):
        findings.add(f"{doing} returned a {type(out).__name__}, but must return a tensor {shape}")
    elif tuple(out.shape) != shape:
        findings.add(f"{doing} returned shape {tuple(out.shape)}, but must return {shape}: (batch, length, emb_dim)")
    elif not out.is_floating_point():
        findings.add(f"{doing} returned {out.dtype}, but must return real numbers")
    elif not torch.isfinite(out).all():
        findings.add(f"{doing} returned {out[~torch.isfinite(out)][0].item()} for finite input")
    else:
        return
    raise StopChecking


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs differ by more than rounding does."""
    return bool((a - b).abs().max() > TOLERANCE * (1.0 + float(b.abs().max())))


def _check_gradients(encoder: nn.Module, forward: Callable[[], Tensor], findings: Findings) -> None:
    """In training mode, every parameter that is to be trained must get a finite gradient."""
    encoder.train()
    with findings.attempt("training: forward and backward"), torch.enable_grad():
        out = forward()
        (out * torch.randn(out.shape).to(out)).sum().backward()
        trained = [(name, p) for name, p in encoder.named_parameters() if p.requires_grad]
        lacking = [name for name, p in trained if p.grad is None]
        if lacking:
            findings.add(
                f"no gradient reaches {', '.join(lacking)}: they would never be trained (is a part unused, or its output detached?); "
                "parameters that are to stay as they are need requires_grad_(False)"
            )
        infinite = [name for name, p in trained if p.grad is not None and not torch.isfinite(p.grad).all()]
        if infinite:
            findings.add(f"the gradient of {', '.join(infinite)} is not finite for finite input")
    encoder.zero_grad(set_to_none=True)
    encoder.eval()


def _device_of(encoder: nn.Module) -> torch.device:
    return next((p.device for p in [*encoder.parameters(), *encoder.buffers()]), torch.device("cpu"))


# ---- timestep encoders ---------------------------------------------------------------------------------------------------


def check_tstep_encoder(encoder: Any, spaces: Any, *, seed: int = 0) -> None:
    """Try a timestep encoder on random observations, and report what training or acting would stumble over.

    Checked are: that it can be built; the shape, dtype and finiteness of its output, for batches and sequences of several sizes; that
    each timestep is encoded on its own and each sequence on its own; that evaluation mode is deterministic; that the input is left
    alone; that gradients reach all parameters; and, if `inner_forward` takes a ``mask``, that the content of padding makes no difference.

    Args:
        encoder: a subclass of `amago.TstepEncoder`, a function that makes one from ``obs_space`` and ``rl2_space``, or one, of which a
            copy is tried.
        spaces: the environment, a function that makes it, or (observation space, action space).
        seed: of the random inputs and parameters. The process's own random numbers are left as they were.

    Raises:
        CheckError: lists all faults that were found.
        TypeError: an argument is none of these.
    """
    obs_space, action_space = spaces_of(spaces)
    rl2 = rl2_space(action_spec(action_space))
    with _checking("check_tstep_encoder found faults of the timestep encoder", seed) as findings:
        module = _built(encoder, TstepEncoder, findings, obs_space=obs_space, rl2_space=rl2)
        width, device = _width(module, findings), _device_of(module)
        space = copy.deepcopy(obs_space)
        space.seed(seed)

        def inputs(batch: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
            rows = [space.sample() for _ in range(batch * length)]
            obs = {
                k: torch.from_numpy(np.stack([row[k] for row in rows])).unflatten(0, (batch, length)).to(device)
                for k in space.spaces
            }
            return obs, torch.randn(batch, length, (rl2.shape or (1,))[-1]).to(device)

        for batch, length in ((2, 3), (1, 1)):
            obs, rl2s = inputs(batch, length)
            _check_output(_forward(module, obs, rl2s, findings), (batch, length, width), _of_inputs(obs, rl2s), findings)
        zeros = {k: torch.zeros_like(v) for k, v in obs.items()}
        _check_output(
            _forward(module, zeros, rl2s, findings), (1, 1, width), "forward of observations that are all 0", findings
        )
        _check_each_alone(module, inputs(2, 3), findings)
        obs, rl2s = inputs(2, 3)
        _check_gradients(module, lambda: module(obs=obs, rl2s=rl2s), findings)
        if module.takes_mask:
            _check_padding(module, inputs(2, 3), inputs(2, 3), findings)


def _of_inputs(obs: dict[str, Tensor], rl2s: Tensor) -> str:
    shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in obs.items())
    return f"forward of obs {shapes} and rl2s {tuple(rl2s.shape)}"


def _forward(module: Any, obs: dict[str, Tensor], rl2s: Tensor, findings: Findings, **more: Any) -> Any:
    kept = {k: v.clone() for k, v in obs.items()}, rl2s.clone()
    with findings.attempt(_of_inputs(obs, rl2s)):
        out = module(obs=obs, rl2s=rl2s, **more)
        changed = [f"obs[{k!r}]" for k, v in kept[0].items() if k not in obs or not obs[k].equal(v)]
        changed += [] if rl2s.equal(kept[1]) else ["rl2s"]
        if changed:
            findings.add(
                f"forward changes its input {', '.join(changed)} in place; other parts of the agent read it, too: work on a copy"
            )
            raise StopChecking
        return out
    raise StopChecking


def _check_each_alone(module: Any, inputs: tuple[dict[str, Tensor], Tensor], findings: Findings) -> None:
    obs, rl2s = inputs
    out = _forward(module, obs, rl2s, findings)
    if differs(_forward(module, obs, rl2s, findings), out):
        findings.add(
            "in evaluation mode, the same input gives two different outputs: random numbers are for self.training alone"
        )
        return
    for what, rows, steps in (
        ("timestep of a sequence", slice(None), slice(1, 2)),
        ("sequence of a batch", slice(0, 1), slice(None)),
    ):
        alone = _forward(module, {k: v[rows, steps] for k, v in obs.items()}, rl2s[rows, steps], findings)
        if differs(alone, out[rows, steps]):
            findings.add(
                f"a {what} is encoded differently when it comes alone: the output must depend on nothing else "
                "(such as statistics of the batch in evaluation mode, or a dimension that is flattened or summed by mistake)"
            )
            return


def _check_padding(
    module: Any, inputs: tuple[dict[str, Tensor], Tensor], other: tuple[dict[str, Tensor], Tensor], findings: Findings
) -> None:
    """In training mode, what is at padding must change neither outputs at real steps nor running statistics."""
    (obs, rl2s), (filling, _) = inputs, other
    mask = torch.ones(*rl2s.shape[:2], 1, dtype=torch.bool, device=rl2s.device)
    mask[1, 1:] = False
    padded = {k: v.clone() for k, v in obs.items()}
    for k, v in padded.items():
        v[1, 1:] = filling[k][1, 1:]
    results = []
    for each in (obs, padded):
        tried = copy.deepcopy(module).train()
        (torch.manual_seed if rl2s.is_cuda else torch.default_generator.manual_seed)(0)  # equal dropout
        out = _forward(tried, each, rl2s, findings, mask=mask)
        results.append((out[mask[..., 0]], [b.double() for b in tried.buffers()]))
    if differs(results[0][0], results[1][0]):
        findings.add("in training mode, the content of padding (mask False) changes the output of real timesteps")
    elif any(differs(a, b) for a, b in zip(results[0][1], results[1][1]) if a.numel()):
        findings.add("in training mode, the content of padding (mask False) changes running statistics (buffers)")


# ---- sequence models -----------------------------------------------------------------------------------------------------


def check_traj_encoder(
    encoder: Any, *, tstep_dim: int = 12, max_seq_len: int = _STEPS, export: bool = True, seed: int = 0
) -> None:
    """Try a sequence model on random sequences, and report what training, acting or exporting would stumble over.

    Checked are: that it can be built; the shape, dtype and finiteness of its output; that it is causal, and that sequences do not
    depend on each other; that evaluation mode is deterministic; that whole sequences, steps with a hidden state whose rows are reset at
    different times, steps of slices of one (if `slice_hidden_state` is defined), and steps that were exported by ``torch.export`` give the
    same output; that rollouts may be longer than ``max_seq_len``; and that gradients reach all parameters.

    Args:
        encoder: a subclass of `amago.TrajEncoder`, a function that makes one from ``tstep_dim`` and ``max_seq_len``, or one, of which a copy
            is tried (and whose sizes are taken).
        tstep_dim, max_seq_len: the sizes with which to build it.
        export: False leaves out the exported step, which takes a second and needs a hidden state that can be exported.
        seed: of the random inputs and parameters. The process's own random numbers are left as they were.

    Raises:
        CheckError: lists all faults that were found.
        TypeError: ``encoder`` is none of these.
    """
    with _checking("check_traj_encoder found faults of the sequence model", seed) as findings:
        module = _built(encoder, TrajEncoder, findings, tstep_dim=tstep_dim, max_seq_len=max_seq_len)
        trial = _SequenceTrial(module, _width(module, findings), findings)
        trial.check_whole_sequences()
        trial.check_steps()
        _check_gradients(module, lambda: trial.whole(trial.seq)[0], findings)
        if export and not findings:
            check_export(module, trial.seq[:, : trial.longest], findings, differs)


class _SequenceTrial:
    """The checks of one sequence model, on one random batch of sequences."""

    def __init__(self, module: TrajEncoder, width: int, findings: Findings):
        self.module, self.width, self.findings = module, width, findings
        self.longest = min(module.max_seq_len, _STEPS)
        self.device = _device_of(module)
        self.seq = torch.randn(3, self.longest + 1, module.tstep_dim).to(self.device)

    def whole(self, seq: Tensor) -> Any:
        """The result for whole sequences that begin at time 0."""
        times = torch.arange(seq.shape[1], device=self.device).expand(len(seq), -1).unsqueeze(-1)
        return self.module(seq=seq, time_idxs=times, hidden_state=None)

    def _check_pair(self, found: Any, shape: tuple[int, ...], doing: str) -> None:
        """Stop unless a call returned an output of this shape, and a hidden state."""
        if self.findings:
            raise StopChecking
        if not isinstance(found, tuple) or len(found) != 2:
            self.findings.add(
                f"{doing} returned a {type(found).__name__}, but must return the output and the next hidden state"
            )
            raise StopChecking
        _check_output(found[0], shape, doing, self.findings)

    def output(self, seq: Tensor) -> Tensor:
        doing = f"forward of a whole sequence {tuple(seq.shape)}"
        found: Any = None
        with self.findings.attempt(doing):
            found = self.whole(seq)
        self._check_pair(found, (*seq.shape[:2], self.width), doing)
        return found[0]  # type: ignore[no-any-return]

    def check_whole_sequences(self) -> None:
        seq, findings = self.seq, self.findings
        out = self.output(seq)
        self.output(seq[:1, :1])
        if differs(self.output(seq), out):
            findings.add(
                "in evaluation mode, the same input gives two different outputs: random numbers are for self.training alone"
            )
            raise StopChecking
        if differs(self.output(seq[1:2]), out[1:2]):
            findings.add("a sequence is mapped differently when it comes alone: it must not depend on the others of its batch")
        later = seq.clone()
        later[:, -2:] += 1.0
        before = seq.shape[1] - 2
        if before > 0 and differs(self.output(later)[:, :before], out[:, :before]):
            findings.add(
                "the model is not causal: the output of a timestep changes with later input, which an actor does not have yet"
            )
            raise StopChecking

    # ---- one step at a time ---------------------------------------------------------------------------------------------

    def step(self, x: Tensor, times: Tensor, hidden: Any, doing: str) -> tuple[Tensor, Any]:
        """The output (B, E) of one step, and the next hidden state."""
        found: Any = None
        with self.findings.attempt(doing):
            found = self.module(seq=x[:, None], time_idxs=times[:, None, None], hidden_state=hidden)
        self._check_pair(found, (len(x), 1, self.width), doing)
        return found[0][:, 0], found[1]

    def first_hidden(self, rows: int) -> Any:
        with self.findings.attempt(f"init_hidden_state({rows}, {str(self.device)!r})"):
            return self.module.init_hidden_state(rows, self.device)
        raise StopChecking

    def reset(self, hidden: Any, dones: Any) -> Any:
        with self.findings.attempt(f"reset_hidden_state with dones {type(dones).__name__} {tuple(dones.shape)}"):
            return self.module.reset_hidden_state(hidden, dones)
        raise StopChecking

    def check_steps(self) -> None:
        if not self._same_in_one_rollout():
            return
        for name, convert in (("an array", np.asarray), ("a tensor", lambda d: torch.as_tensor(d, device=self.device))):
            if not self._same_with_resets(name, convert):
                return
        self._check_long()
        hidden = self.first_hidden(len(self.seq))
        if hidden is not None and self.module.can_slice_hidden_state(hidden):
            self._check_slices(hidden)

    def _same_in_one_rollout(self) -> bool:
        """Without resets."""
        expected, hidden = self.output(self.seq[:, : self.longest]), self.first_hidden(len(self.seq))
        for t in range(self.longest):
            times = torch.full((len(self.seq),), t, device=self.device)
            out, hidden = self.step(self.seq[:, t], times, hidden, f"step {t} of a rollout")
            if differs(out, expected[:, t]):
                self.findings.add(
                    f"step {t} of a rollout, taken with the hidden state of the step before, gives another output than the whole "
                    "sequence: an actor would not do what was trained"
                )
                return False
        return True

    def _same_with_resets(self, name: str, convert: Callable[[Any], Any]) -> bool:
        """Rows that begin new rollouts at different times, each of which must equal a whole sequence of its own."""
        n, steps = len(self.seq), 2 * self.longest
        lengths = [max(1, self.longest - 2 * row) for row in range(n)]
        seq = torch.randn(n, steps, self.module.tstep_dim).to(self.device)
        hidden, outs = self.first_hidden(n), []
        for t in range(steps):
            clock = [t % length for length in lengths]
            dones = np.array([c == 0 for c in clock])
            if t and dones.any():
                hidden = self.reset(hidden, convert(dones))
            out, hidden = self.step(seq[:, t], torch.tensor(clock, device=self.device), hidden, f"step {t}, after resets")
            outs.append(out)
        found = torch.stack(outs, 1)
        for row, length in enumerate(lengths):
            for begin in range(0, steps, length):
                piece = slice(begin, min(begin + length, steps))
                expected = self.output(seq[row : row + 1, piece])[0]
                wrong = [t for t in range(len(expected)) if differs(found[row, begin + t], expected[t])]
                if wrong:
                    began = f"which was reset at step {begin}" if begin else "which was not reset yet"
                    self.findings.add(
                        f"after reset_hidden_state with {name} that is True in some rows, step {begin + wrong[0]} of row {row}, {began}, "
                        "gives another output than a whole sequence of its rollout: rows with True must be as from init_hidden_state, the "
                        "others must stay as they are"
                    )
                    return False
        return True

    def _check_long(self) -> None:
        """Rollouts may last longer than a training sequence."""
        if self.module.max_seq_len > 2 * _STEPS:
            return  # would take long
        hidden = self.first_hidden(len(self.seq))
        for t in range(2 * self.module.max_seq_len + 3):
            times = torch.full((len(self.seq),), t, device=self.device)
            doing = f"step {t} of a rollout, with max_seq_len={self.module.max_seq_len},"
            _, hidden = self.step(self.seq[:, t % self.longest], times, hidden, doing)

    def _check_slices(self, hidden: Any) -> None:
        """Groups of actors that step with slices of one hidden state, and then all with the whole of it."""
        expected = self.output(self.seq[:, : self.longest])
        groups = slice(0, 1), slice(1, 3)
        parts = [self.module.slice_hidden_state(hidden, g.start, g.stop) for g in groups]
        for t in range(self.longest - 1):
            for i, g in enumerate(groups):
                times = torch.full((g.stop - g.start,), t, device=self.device)
                out, parts[i] = self.step(
                    self.seq[g, t], times, parts[i], f"step {t} with slice_hidden_state({g.start}, {g.stop})"
                )
                if differs(out, expected[g, t]):
                    self.findings.add(
                        f"step {t} with slice_hidden_state({g.start}, {g.stop}) gives another output than all rows together"
                    )
                    return
        times = torch.full((len(self.seq),), self.longest - 1, device=self.device)
        out, _ = self.step(self.seq[:, self.longest - 1], times, hidden, "a step of all rows after steps of slices")
        if self.longest > 1 and differs(out, expected[:, -1]):
            self.findings.add(
                "slice_hidden_state does not share the storage of the whole hidden state, or forward does not update it in place: after "
                "steps of slices, the whole does not know of them. Leave slice_hidden_state undefined; groups then act one after another"
            )
