"""Checks of encoders against the contracts of their base classes: B sequences or actors, L timesteps, E outputs of a timestep."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from amago.agent.base import BaseAgent
from amago.data.findings import CheckError, of_exception
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.spaces import action_spec, rl2_space, spaces_of

log = logging.getLogger(__name__)
_STEPS = 8  # of a rollout
_TOLERANCE = 1e-3  # relative to the size of outputs: much more than rounding in float32
_RANDOM = "in evaluation mode, the same input gives two different outputs: random numbers are for self.training alone"
_NO_EXPORT = "; pass export=False if the agent is never to be exported"
M = TypeVar("M", bound=nn.Module)
Memory = dict[str, Tensor]


def check_tstep_encoder(encoder: object, spaces: object, *, seed: int = 0) -> None:
    """Try a timestep encoder on random observations, and report a fault that would break training or acting.

    The checks: the output has the right shape for all sizes, and is finite; timesteps and sequences do not influence each other;
    evaluation mode is deterministic; the input is not changed; gradients reach all parameters; and, if `inner_forward` takes a
    ``mask``, the content of padding makes no difference.

    Args:
        encoder: a subclass of `amago.TstepEncoder`, a function that makes one from ``obs_space`` and ``rl2_space``, or an
            encoder, of which a copy is checked.
        spaces: the environment, a function that makes it, or (observation space, action space).
        seed: of the random inputs and parameters. The process's own random numbers are left as they were.

    Raises:
        CheckError: the first fault that was found.
        TypeError: an argument is none of these.
    """
    obs_space, action_space = spaces_of(spaces)
    rl2 = rl2_space(action_spec(action_space))
    with _seeded(seed):
        module = _built(encoder, TstepEncoder, obs_space=obs_space, rl2_space=rl2)  # type: ignore[type-abstract]
        width, device, space = _width_of(module), _device_of(module), copy.deepcopy(obs_space)
        space.seed(seed)

        def inputs(b: int, length: int) -> dict[str, Tensor]:
            rows = [space.sample() for _ in range(b * length)]
            obs = {k: torch.from_numpy(np.stack([row[k] for row in rows])).unflatten(0, (b, length)) for k in space.spaces}
            return {k: v.to(device) for k, v in ({"rl2s": torch.randn(b, length, rl2.shape[-1])} | obs).items()}

        def encode(x: dict[str, Tensor], of: nn.Module = module, **mask: Tensor) -> Tensor:
            obs = {k: v.clone() for k, v in x.items()}
            given, rl2s = dict(obs), obs.pop("rl2s")
            doing = f"forward of obs {', '.join(f'{k} {tuple(v.shape)}' for k, v in obs.items())}"
            with _attempt(doing):
                out = of(obs=obs, rl2s=rl2s, **mask)
            changed = [k if k == "rl2s" else f"obs[{k!r}]" for k, v in x.items() if not given[k].equal(v)]
            _require(not changed, f"forward changes its input {', '.join(changed)} in place; other parts of the agent read it")
            return _checked(out, (*rl2s.shape[:2], width), doing)

        x, one, other = inputs(2, 3), inputs(1, 1), inputs(2, 3)
        out = encode(x)
        encode(one)
        with _attempt("forward of observations that are all 0"):
            encode({k: v if k == "rl2s" else torch.zeros_like(v) for k, v in one.items()})
        _require_same(encode(x), out, _RANDOM)
        for what, rows, steps in (
            ("timestep of a sequence", slice(2), slice(1, 2)),
            ("sequence of a batch", slice(1), slice(3)),
        ):
            alone = encode({k: v[rows, steps] for k, v in x.items()})
            _require_same(alone, out[rows, steps], f"a {what} is encoded differently when it comes alone")
        _check_gradients(module, lambda: encode(x))
        if module.takes_mask:
            mask = torch.ones(2, 3, 1, dtype=torch.bool, device=device)
            mask[1, 1:] = False
            padded = {k: torch.where(mask.view(2, 3, *(1,) * (v.ndim - 2)), v, other[k]) for k, v in x.items() if k != "rl2s"}
            found = []
            for each in (x, x | padded):
                tried = copy.deepcopy(module).train()
                torch.default_generator.manual_seed(0)  # equal dropout
                found.append(
                    [encode(each, tried, mask=mask)[mask[..., 0]], *(b.double() for b in tried.buffers() if b.numel())]
                )
            for n, (mine, padded_too) in enumerate(zip(*found)):
                changed = "running statistics (buffers)" if n else "the output of real timesteps"
                _require_same(mine, padded_too, f"in training mode, the content of padding (mask False) changes {changed}")


def check_traj_encoder(
    encoder: object, *, tstep_dim: int = 12, max_seq_len: int = _STEPS, export: bool = True, seed: int = 0
) -> None:
    """Try a sequence model on random sequences, and report a fault that would break training, acting or exporting.

    The checks: the output has the right shape and is finite; the model is causal, and sequences do not influence each other;
    evaluation mode is deterministic; whole sequences, steps with a hidden state whose rows are reset at different times, steps of
    slices of it (if `slice_hidden_state` is defined), and exported steps give the same output; rollouts may be longer than
    ``max_seq_len``; and gradients reach all parameters.

    Args:
        encoder: a subclass of `amago.TrajEncoder`, a function that makes one from ``tstep_dim`` and ``max_seq_len``, or a
            model, of which a copy is checked (with its own sizes).
        tstep_dim, max_seq_len: the sizes with which to build it.
        export: False leaves out the exported step, which needs a hidden state that can be exported.
        seed: of the random inputs and parameters. The process's own random numbers are left as they were.

    Raises:
        CheckError: the first fault that was found.
        TypeError: ``encoder`` is none of these.
    """
    with _seeded(seed):
        module = _built(encoder, TrajEncoder, tstep_dim=tstep_dim, max_seq_len=max_seq_len)  # type: ignore[type-abstract]
        longest, width, device = min(module.max_seq_len, _STEPS), _width_of(module), _device_of(module)
        seq = torch.randn(3, longest + 1, module.tstep_dim).to(device)

        def run(x: Tensor, times: Tensor, hidden: object, doing: str) -> tuple[Tensor, object]:
            with _attempt(doing):
                found = module(seq=x, time_idxs=times.to(device)[..., None], hidden_state=hidden)
            pair = isinstance(found, tuple) and len(found) == 2
            _require(pair, f"{doing} returned a {type(found).__name__}, but must return the output and the next hidden state")
            return _checked(found[0], (*x.shape[:2], width), doing), found[1]

        def whole(x: Tensor) -> Tensor:
            times = torch.arange(x.shape[1]).expand(len(x), -1)
            return run(x, times, None, f"forward of a whole sequence {tuple(x.shape)}")[0]

        def step(x: Tensor, times: Tensor, hidden: object, doing: str) -> tuple[Tensor, object]:
            out, hidden = run(x[:, None], times[:, None], hidden, doing)
            return out[:, 0], hidden

        def first() -> object:
            with _attempt(f"init_hidden_state(3, {str(device)!r})"):
                return module.init_hidden_state(3, device)

        out = whole(seq)
        _require_same(whole(seq), out, _RANDOM)
        _require_same(whole(seq[1:2]), out[1:2], "a sequence is mapped differently alone, without its batch")
        later = seq + (torch.arange(longest + 1, device=device) >= longest).unsqueeze(-1)
        fault = "the model is not causal: the output of a timestep changes with later input"
        _require_same(whole(later)[:, :longest], out[:, :longest], fault)
        expected, hidden = whole(seq[:, :longest]), first()
        for t in range(2 * module.max_seq_len + 3 if module.max_seq_len <= 2 * _STEPS else longest):
            doing = f"step {t} of a rollout, with max_seq_len={module.max_seq_len},"
            out, hidden = step(seq[:, t % longest], torch.full((3,), t), hidden, doing)
            if t < longest:
                fault = f"step {t} of a rollout, from the hidden state of the step before, differs from the whole sequence"
                _require_same(out, expected[:, t], fault)
        _check_resets(module, step, whole, first)
        _check_slices(module, step, first(), seq, expected)
        _check_gradients(module, lambda: whole(seq))
        if export:
            _check_export(module, seq[:, :longest], expected)


Step = Callable[[Tensor, Tensor, object, str], tuple[Tensor, object]]


def _check_resets(module: TrajEncoder, step: Step, whole: Callable[[Tensor], Tensor], first: Callable[[], object]) -> None:
    """Compare rows that begin new rollouts at different times with whole sequences."""
    device, longest = _device_of(module), min(module.max_seq_len, _STEPS)
    lengths = [max(1, longest - 2 * row) for row in range(3)]
    seq = torch.randn(3, 2 * longest, module.tstep_dim).to(device)
    for name in ("an array", "a tensor"):
        hidden, outs = first(), []
        for t in range(2 * longest):
            clock = torch.tensor([t % length for length in lengths])
            if t and (clock == 0).any():
                dones = (clock == 0).numpy() if name == "an array" else (clock == 0).to(device)
                with _attempt(f"reset_hidden_state with dones {type(dones).__name__} {tuple(dones.shape)}"):
                    hidden = module.reset_hidden_state(hidden, dones)
            out, hidden = step(seq[:, t], clock, hidden, f"step {t}, after resets")
            outs.append(out)
        found = torch.stack(outs, dim=1)
        for row, length in enumerate(lengths):
            for begin in range(0, 2 * longest, length):
                rollout = slice(row, row + 1), slice(begin, begin + length)
                state = f"was reset at step {begin}" if begin else "was not reset yet"
                _require_same(
                    found[rollout],
                    whole(seq[rollout]),
                    f"after reset_hidden_state with {name}, row {row}, which {state}, differs from a whole sequence of its rollout: rows with "
                    "True must be as from init_hidden_state, the others must stay as they are",
                )


def _check_slices(module: TrajEncoder, step: Step, hidden: object, seq: Tensor, expected: Tensor) -> None:
    """Compare steps of groups of rows, in turns with one hidden state, with steps of all rows together."""
    if hidden is None or not module.can_slice_hidden_state(hidden):
        return
    longest = expected.shape[1]
    parts = {g: module.slice_hidden_state(hidden, *g) for g in ((0, 1), (1, 3))}
    for t in range(longest - 1):
        for (start, stop), part in parts.items():
            doing = f"step {t} with slice_hidden_state({start}, {stop})"
            out, parts[start, stop] = step(seq[start:stop, t], torch.full((stop - start,), t), part, doing)
            _require_same(out, expected[start:stop, t], f"{doing} gives another output than all rows together")
    out, _ = step(seq[:, longest - 1], torch.full((3,), longest - 1), hidden, "a step of all rows after steps of slices")
    fault = "slice_hidden_state does not share storage, or forward does not update it in place: leave it undefined"
    _require_same(out, expected[:, -1], fault)


class _ExportedStep(nn.Module):
    """One step of a sequence model without state, as `amago.policy.export.StepModel` takes it."""

    def __init__(self, module: TrajEncoder):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, times: Tensor, dones: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        hidden = self.module.import_hidden_state(memory, dones)
        out, hidden = self.module(seq=x.unsqueeze(1), time_idxs=times[:, None, None], hidden_state=hidden)
        return out[:, 0], dict(sorted(self.module.export_hidden_state(hidden).items()))


def _check_export(module: TrajEncoder, seq: Tensor, expected: Tensor) -> None:
    """Compare steps with exported hidden states, and steps of a traced program, with whole sequences."""
    (n, longest, _), device = seq.shape, seq.device

    def empty(rows: int) -> Memory:
        return dict(sorted(module.export_hidden_state(module.init_hidden_state(rows, device)).items()))

    with _attempt("export_hidden_state", _NO_EXPORT):
        memory, more = empty(n), empty(n + 1)
    axes = {}
    for name, tensor in memory.items():
        axes[name] = [i for i, (a, b) in enumerate(zip(tensor.shape, more[name].shape)) if a != b]
        shape = tuple(tensor.shape)
        _require(len(axes[name]) == 1, f"export_hidden_state: one dimension of {name!r} {shape} must count actors{_NO_EXPORT}")

    def compare(step: nn.Module, what: str) -> None:
        """Two rollouts in a row, the second after ``dones``."""
        memory = empty(n)
        for t in range(2 * longest):
            dones, before = torch.full((n,), t == longest, device=device), {k: v.clone() for k, v in memory.items()}
            with _attempt(what):
                out, after = step(seq[:, t % longest], torch.full((n,), t % longest, device=device), dones, memory)
            late = " after all rows were done" if t >= longest else ""
            _require_same(out, expected[:, t % longest], f"{what} differ from whole sequences{late} (step {t})")
            changed = ", ".join(k for k, v in before.items() if not memory[k].equal(v))
            _require(not changed, f"{what}: {changed} is changed in place; import_hidden_state must copy what is written")
            memory = after

    compare(_ExportedStep(module), "steps with export_hidden_state and import_hidden_state")
    size = torch.export.Dim("num_envs", min=1)
    zeros = torch.zeros(n, dtype=torch.int64, device=device)
    example, shapes = (seq[:, 0].contiguous(), zeros, zeros.bool(), memory), {k: {a[0]: size} for k, a in axes.items()}
    with _attempt("torch.export of a step", _NO_EXPORT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that keep their weights in lists, as torch's own LSTM does
        dynamic = ({0: size}, {0: size}, {0: size}, shapes)
        traced = torch.export.export(_ExportedStep(module), example, dynamic_shapes=dynamic).module()
    compare(traced, "the step that torch.export made")


# ---- shared by both ---------------------------------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed random numbers within the block; the process's own are left as they were."""
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` also seeds GPUs that are not in use yet
        yield


def _require(right: bool, fault: str) -> None:
    if not right:
        raise CheckError("the encoder has a fault", (fault,))


@contextmanager
def _attempt(doing: str, remedy: str = "") -> Iterator[None]:
    """Turn an exception of the encoder into a fault that names the attempted call."""
    try:
        yield
    except CheckError as err:
        _require(doing in str(err), f"{doing}: {err.problems[0]}")
        raise
    except Exception as err:
        raise CheckError("the encoder has a fault", (f"{doing} raised {of_exception(err)[:500]}{remedy}",)) from err


def _built(part: object, base: type[M], **arguments: object) -> M:
    """An encoder made by the class or function ``part``, or a copy of it if it is one already, in evaluation mode."""
    if isinstance(part, base):
        return copy.deepcopy(part).eval()
    if not callable(part):
        raise TypeError(f"{part!r} must be a subclass of {base.__name__}, a function that makes one, or one")
    with _attempt(f"making the encoder from {', '.join(arguments)}"):
        made = part(**arguments)
    _require(isinstance(made, base), f"a {type(made).__name__} was made, which is no subclass of amago.{base.__name__}")
    return made.eval()  # type: ignore[no-any-return]


def _width_of(encoder: TstepEncoder | TrajEncoder) -> int:
    with _attempt("emb_dim"):
        width = encoder.emb_dim
    right = isinstance(width, int) and width >= 1
    _require(right, f"emb_dim is {width!r}, but must be the number of outputs of a timestep, at least 1")
    return width


def _device_of(encoder: nn.Module) -> torch.device:
    return next((p.device for p in [*encoder.parameters(), *encoder.buffers()]), torch.device("cpu"))


def _checked(out: object, shape: tuple[int, ...], doing: str) -> Tensor:
    """An output, which must be a tensor of finite real numbers of this shape."""
    _require(isinstance(out, Tensor), f"{doing} returned a {type(out).__name__}, but must return a tensor {shape}")
    assert isinstance(out, Tensor)
    _require(tuple(out.shape) == shape, f"{doing} returned shape {tuple(out.shape)}, not (batch, length, emb_dim): {shape}")
    _require(out.is_floating_point(), f"{doing} returned {out.dtype}, but must return real numbers")
    _require(bool(out.isfinite().all()), f"{doing} returned {out[~out.isfinite()][:1].tolist()} for finite input")
    return out


def _require_same(a: Tensor, b: Tensor, fault: str) -> None:
    """Two outputs differ by no more than rounding."""
    _require(not (a - b).abs().max() > _TOLERANCE * (1.0 + float(b.abs().max())), fault)


def _check_gradients(encoder: nn.Module, forward: Callable[[], Tensor]) -> None:
    """Every parameter that is to be trained gets a finite gradient in training mode."""
    encoder.train()
    with _attempt("training: forward and backward"), torch.enable_grad():
        out = forward()
        (out * torch.randn(out.shape).to(out)).sum().backward()
    trained = {name: p.grad for name, p in encoder.named_parameters() if p.requires_grad}
    lacking = ", ".join(name for name, grad in trained.items() if grad is None)
    _require(not lacking, f"no gradient reaches {lacking}; parameters that are to stay as they are need requires_grad_(False)")
    infinite = ", ".join(name for name, grad in trained.items() if grad is not None and not grad.isfinite().all())
    _require(not infinite, f"the gradient of {infinite} is not finite for finite input")
    encoder.zero_grad(set_to_none=True)
    encoder.eval()


def warn_of_faulty_parts(agent: BaseAgent) -> None:
    """Check copies of an agent's timestep encoder and sequence model, unless they are this library's own classes, and warn of faults. Neither
    the agent nor the process's random numbers change."""
    spaces = agent.obs_space, agent.action_space
    checks: list[tuple[Any, Callable[[], object]]] = [
        (agent.tstep_encoder, lambda: check_tstep_encoder(agent.tstep_encoder, spaces)),
        (agent.traj_encoder, lambda: check_traj_encoder(agent.traj_encoder, export=False)),
    ]
    for part, check in checks:
        if type(part).__module__.partition(".")[0] != "amago":
            name = f"{type(part).__module__}.{type(part).__qualname__}"
            try:
                check()
            except CheckError as err:
                warnings.warn(
                    f"{name}: {err}\nTraining begins all the same, and may learn little or act otherwise.", stacklevel=2
                )
            except Exception as err:  # a part that cannot be copied may train all the same
                log.info("%s could not be checked: %r", name, err)
