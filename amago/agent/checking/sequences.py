"""`check_traj_encoder`: whether a sequence model keeps the contract of its base class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago.agent.checking.common import built, check_gradients, check_output, checking, device_of, differs, width_of
from amago.agent.checking.export import check_export
from amago.data.findings import Findings, StopChecking
from amago.nets.traj_encoders import TrajEncoder

_STEPS = 8  # of a rollout


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
    with checking("check_traj_encoder found faults of the sequence model", seed) as findings:
        module = built(encoder, TrajEncoder, findings, tstep_dim=tstep_dim, max_seq_len=max_seq_len)
        trial = _SequenceTrial(module, width_of(module, findings), findings)
        trial.check_whole_sequences()
        trial.check_steps()
        check_gradients(module, lambda: trial.whole(trial.seq)[0], findings)
        if export and not findings:
            check_export(module, trial.seq[:, : trial.longest], findings, differs)


class _SequenceTrial:
    """The checks of one sequence model, on one random batch of sequences."""

    def __init__(self, module: TrajEncoder, width: int, findings: Findings):
        self.module, self.width, self.findings = module, width, findings
        self.longest = min(module.max_seq_len, _STEPS)
        self.device = device_of(module)
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
        check_output(found[0], shape, doing, self.findings)

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
