"""Upload a finished checkpoint to the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)

from compress.checkpoint.containers.digests import MANIFEST, WORK
from compress.checkpoint.sources.untrusted import read_json
from compress.errors import OutputError, SaveError, one_line
from compress.pipeline.output import check_files
from compress.pipeline.provenance import RECIPE_FILE
from compress.recipe.yaml import yaml_of

LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


class Hub(Protocol):
    """The methods of `huggingface_hub.HfApi` that an upload uses."""

    def whoami(self) -> Any:
        """The user who is logged in."""
        ...

    def repo_info(self, repo_id: str) -> Any:
        """Return what is known of a repository."""
        ...

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        """Create a repository, or return the existing one."""
        ...

    def create_commit(self, repo_id: str, operations: list[CommitOperationAdd], *, commit_message: str) -> Any:
        """Upload files in one commit."""
        ...


def check_login(repository: str, hub: Hub | None = None, private: bool = True) -> None:
    """Check what an upload needs; called before a run whose result is to be uploaded.

    Raises:
        OutputError: if no user is logged in to the hub, the name is none of a repository, or a private repository is
            wanted and this one is public.
    """
    if not all(repository.split("/")) or repository.count("/") > 1:
        raise OutputError(f"{repository}: is no repository of the hub; write NAME or OWNER/NAME")
    hub = hub or HfApi()
    try:
        user = hub.whoami()["name"]
        is_public = not hub.repo_info(repository if "/" in repository else f"{user}/{repository}").private
    except RepositoryNotFoundError:  # it will be created
        return
    except LocalTokenNotFoundError as error:
        raise OutputError(f"{repository}: not logged in to the hub; {LOGIN}") from error
    except (HfHubHTTPError, OSError) as error:
        raise OutputError(f"{repository}: the hub refuses the login ({one_line(error)}); {LOGIN}") from error
    if private and is_public:
        raise OutputError(
            f"{repository}: exists and is public; say that the checkpoint is to be public (private: "
            "false), or write the name of another repository"
        )


def push_to_hub(folder: str | Path, repository: str, private: bool = True, hub: Hub | None = None) -> str:
    """Upload the files of a finished run to a repository of the hub, which is created if needed; return its address.

    Only files that the run has written are uploaded, with a recipe that names no folder of this machine.

    Args:
        folder: Output folder of the run.
        repository: NAME or OWNER/NAME.
        private: Whether a new repository is private; if so, an existing public one is refused.
        hub: By default `huggingface_hub.HfApi()`.

    Raises:
        OutputError: for a folder without a finished and verified run, a missing login, a name that the hub refuses, and
            a public repository.
        SaveError: if the upload fails.
    """
    folder, hub = Path(folder), hub or HfApi()
    contents = upload_operations(folder)
    check_login(repository, hub, private)
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.create_commit(repository, contents, commit_message="Upload a compressed checkpoint")
    except HFValidationError as error:
        raise OutputError(f"{repository}: {one_line(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        raise SaveError(
            f"{repository}: the upload failed ({one_line(error)}); the checkpoint is kept in {folder}, and the same "
            "command tries again"
        ) from error
    return f"https://huggingface.co/{repository}"


def upload_operations(folder: Path) -> list[CommitOperationAdd]:
    """Return the operations that add the `finished_files` of a folder."""
    return [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in finished_files(folder).items()
    ]


def finished_files(folder: Path) -> dict[str, Path | bytes]:
    """Return the files to upload by name, or their content: those that the manifest of a complete run lists.

    The recipe names no folder of this machine.

    Raises:
        OutputError: for another folder; the report of a run is written after the verification.
    """
    try:
        manifest = read_json(folder / WORK / MANIFEST)
        recipe = json.loads((folder / "report.json").read_text(encoding="utf-8"))["reproduce"]["recipe"]
        names = check_files(manifest["files"], folder)
        complete = manifest["complete"] is True
    except (OSError, ValueError, KeyError):
        complete, names, recipe = False, {}, {}
    if not complete:
        raise OutputError(f"{folder}: holds no finished run; finish `compress run` with this folder as -o first")
    paths = {name: folder / name for name in sorted(names)}
    files: dict[str, Path | bytes] = {n: path for n, path in paths.items() if path.is_file() and not path.is_symlink()}
    return files | ({RECIPE_FILE: yaml_of(recipe).encode()} if RECIPE_FILE in files else {})
