"""Cards on the Hugging Face Hub, or on another server with its interface (the variable HF_ENDPOINT)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amago import __version__
from amago.policy.card.write import PAGE_FILE, RESULTS_FILE, SETTINGS_FILE, WEIGHTS_FILE, is_card, refuse_secrets
from amago.policy.spec import SPEC_FILE
from amago.run.weights import load_weight_file

VIDEOS = ("replay.mp4", "replay.gif")
"""The Hub plays a file of the first name beside an agent's page."""
FILES = (PAGE_FILE, WEIGHTS_FILE, SPEC_FILE, SETTINGS_FILE, RESULTS_FILE, "train_args.json", *VIDEOS, "LICENSE", "memory.png")
"""The files of cards that are sent and fetched; others are not."""
_OF_THE_SERVER = (".gitattributes", ".gitignore")
_NEEDED = (PAGE_FILE, WEIGHTS_FILE, SPEC_FILE)


class HubError(RuntimeError):
    """The Hub could not be reached, refused a request, or has no such card."""


def _api(token: str | None) -> Any:
    try:
        import huggingface_hub
    except ImportError as err:
        raise ImportError(f"the Hub needs huggingface_hub: pip install 'amago[hub]' ({err})") from err
    # by hand: the package reads the variable once, when something first imports it
    return huggingface_hub.HfApi(
        endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="amago", library_version=__version__
    )


@contextmanager
def _requests(api: Any, doing: str) -> Iterator[None]:
    """Errors of requests as `HubError`, in one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except HFValidationError as err:
        raise ValueError(str(err)) from err
    except LocalTokenNotFoundError as err:
        raise HubError(f"{doing}: there is no access token; log in with 'hf auth login', or set HF_TOKEN") from err
    except HfHubHTTPError as err:
        code = getattr(getattr(err, "response", None), "status_code", None)
        hint = (
            "; is the name right, and does your access token (HF_TOKEN, or 'hf auth login') allow it?"
            if code in (401, 403, 404)
            else ""
        )
        raise HubError(f"{doing}: {api.endpoint} answered {code}{hint} {_first_line(err)}".rstrip()) from err
    except (HubError, ValueError, TypeError, ImportError):
        raise
    except Exception as err:  # requests, httpx and hf_xet have kinds of their own, by version
        raise HubError(f"{doing} failed at {api.endpoint}: {_first_line(err)}") from err


def _first_line(err: BaseException) -> str:
    """What an error and those that caused it say, without what repeats."""
    said: list[str] = []
    cause: BaseException | None = err
    while cause is not None:
        line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        said += [line] if line not in said else []
        cause = cause.__cause__
    return f"({'; '.join(said)})"


def push_card(
    directory: str | Path, repo_id: str, private: bool = False, message: str | None = None, token: str | None = None
) -> str:
    """Upload a card to a repository of models, which is created if there is none.

    Args:
        directory: of `write_card`.
        repo_id: "USER/NAME" or "ORGANISATION/NAME".
        private: of a new repository: only its owners see it.
        message: of the commit.
        token: to log in with; None: the variable HF_TOKEN, or that of ``hf auth login``.

    Returns:
        the address of the page.

    Raises:
        ValueError: the directory is no card, holds files that cards do not have, or something that looks like a secret.
        CheckpointError: the weights are damaged.
        HubError: the Hub could not be reached, or refused.
        ImportError: huggingface_hub is not installed (``pip install 'amago[hub]'``).
    """
    directory = Path(directory).expanduser()
    files = _checked(directory)
    api = _api(token)
    with _requests(api, f"push to {repo_id}"):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api.create_repo(repo_id, private=private, exist_ok=True, repo_type="model")
        there = set(api.list_repo_files(repo_id))
        # of a film in another format, and of settings that this card lacks
        stale = sorted(there & set(FILES) - set(files))
        operations: list[Any] = [CommitOperationAdd(name, str(directory / name)) for name in files]
        operations += [CommitOperationDelete(name) for name in stale]
        api.create_commit(repo_id, operations, commit_message=message or f"{directory.resolve().name}, with amago card")
    return f"{api.endpoint}/{repo_id}"


def _checked(directory: Path) -> list[str]:
    """The files of a card to send, if all is well with them."""
    if not directory.is_dir() or not is_card(directory):
        raise ValueError(
            f"{directory} is no card: it lacks {', '.join(n for n in _NEEDED if not (directory / n).is_file())}; make one with 'amago card RUN'"
        )
    names = sorted(p.name for p in directory.iterdir() if p.name not in (".cache", *_OF_THE_SERVER))
    others = [
        name for name in names if name not in FILES or not (directory / name).is_file() or (directory / name).is_symlink()
    ]
    if others:
        raise ValueError(
            f"{directory} holds {', '.join(others)}, which are no files of a card ({', '.join(FILES)}): remove them, since only those are sent"
        )
    refuse_secrets(directory)
    load_weight_file(directory / WEIGHTS_FILE)
    return names


def pull_card(repo_id: str, out: str | Path | None = None, revision: str | None = None, token: str | None = None) -> Path:
    """Download a card. Only files that cards have are fetched, none of which can hold a pickled object; nothing of them is run.

    Args:
        repo_id: "USER/NAME".
        out: the directory, which is created; None: NAME, in the current directory.
        revision: a branch, a tag or a commit; None: the newest.
        token: see `push_card`.

    Returns:
        the directory, complete: it appears at once.

    Raises:
        ValueError: ``out`` exists, or ``repo_id`` cannot be a name.
        HubError: there is no such repository, it holds no card, or the Hub could not be reached.
        CheckpointError: what was downloaded is damaged.
        ImportError: huggingface_hub is not installed (``pip install 'amago[hub]'``).
    """
    out = Path(repo_id.rpartition("/")[2] if out is None else out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: name another directory with out=... (--out)")
    api = _api(token)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".pull-") as scratch:
        card = Path(scratch, "card")
        with _requests(api, f"pull of {repo_id}"):
            info = api.model_info(repo_id, revision=revision)
            # by exact names: a repository may hold names that lead out of the directory
            names = [s.rfilename for s in info.siblings or [] if s.rfilename in FILES]
            missing = [n for n in (WEIGHTS_FILE, SPEC_FILE) if n not in names]
            if missing:
                raise HubError(f"{repo_id} holds no agent of amago: it lacks {', '.join(missing)}")
            for name in names:
                api.hf_hub_download(repo_id, name, revision=info.sha or revision, local_dir=card)
        shutil.rmtree(card / ".cache", ignore_errors=True)  # of huggingface_hub, about the download
        load_weight_file(card / WEIGHTS_FILE)
        os.rename(card, out)  # replaces an empty directory
    return out
