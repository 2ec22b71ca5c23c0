"""Upload a finished checkpoint to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from compress.checkpoint.sources.untrusted import read_json
from compress.errors import OutputError, SaveError, one_line
from compress.pipeline.checkpoint import WORK

LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"
LEFT_OUT = [f"{WORK}/**", "*.part"]
"""Files of an output folder that are not uploaded: the work folder of a run, and unfinished files."""


class Hub(Protocol):
    """The methods of `huggingface_hub.HfApi` that an upload uses."""

    def whoami(self) -> Any:
        """The user who is logged in."""
        ...

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Create a repository, or return the existing one."""
        ...

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str, ignore_patterns: list[str]) -> Any:
        """Upload a folder in one commit."""
        ...


def check_login(repository: str, hub: Hub | None = None) -> None:
    """Raise OutputError unless a user is logged in to the hub; called before a run whose result is to be uploaded."""
    if not all(repository.split("/")) or repository.count("/") > 1:
        raise OutputError(f"--push-to-hub {repository}: is no repository of the hub; write NAME or OWNER/NAME")
    try:
        (hub or HfApi()).whoami()
    except LocalTokenNotFoundError as error:
        raise OutputError(f"--push-to-hub {repository}: not logged in to the hub; {LOGIN}") from error
    except (HfHubHTTPError, OSError) as error:
        raise OutputError(
            f"--push-to-hub {repository}: the hub refuses the login ({one_line(error)}); {LOGIN}"
        ) from error


def push_to_hub(folder: str | Path, repository: str, private: bool = False, hub: Hub | None = None) -> str:
    """Upload the folder of a finished run to a repository of the hub, which is created if needed; return its address.

    private: whether a new repository is private. hub: by default `huggingface_hub.HfApi()`.

    Raises OutputError for a folder without a finished and verified run, a missing login, or a name that the hub
    refuses; SaveError if the upload fails.
    """
    folder, hub = Path(folder), hub or HfApi()
    _check_finished(folder)
    check_login(repository, hub)
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a compressed checkpoint",
            ignore_patterns=LEFT_OUT,
        )
    except HFValidationError as error:
        raise OutputError(f"--push-to-hub {repository}: {one_line(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        raise SaveError(
            f"--push-to-hub {repository}: the upload failed ({one_line(error)}); the checkpoint is kept in {folder}, "
            "and the same command tries again"
        ) from error
    return f"https://huggingface.co/{repository}"


def _check_finished(folder: Path) -> None:
    """Raise OutputError unless the folder holds a complete run; its report is written after the verification."""
    try:
        complete = read_json(folder / WORK / "manifest.json").get("complete") is True
    except ValueError:
        complete = False
    if not complete or not (folder / "report.json").exists():
        raise OutputError(f"{folder}: holds no finished run; finish `compress run` with this folder as -o first")
