"""A policy's folder on the Hugging Face hub, by the hub library's own login, address (HF_ENDPOINT) and token."""

from __future__ import annotations

import shlex
from pathlib import Path

from grpo_jax.errors import UserError, one_line, said


def require_hub(repo: str) -> None:
    """Raises UserError for what is no repository's name, without a login, or offline; asks nobody over the network."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
        _, _ = repo.split("/")  # `true`, as it is elsewhere, would be a name
    except (HFValidationError, ValueError) as error:
        raise UserError(f"push_to_hub: expected OWNER/NAME of a repository, got {said(repo)}") from error
    if constants.HF_HUB_OFFLINE:
        raise UserError("push_to_hub: the hub is switched off here (HF_HUB_OFFLINE); unset it")
    if get_token() is None:
        raise UserError("push_to_hub: nobody is logged in to the hub; run `hf auth login`, or set HF_TOKEN")


def push_folder(folder: str | Path, repo: str, *, private: bool = False) -> str:
    """Uploads a folder's files as one commit to a repository, which is made if there is none.

    Args:
        folder: What to upload; it stays as it is, whatever happens.
        repo: "owner/name".
        private: Whether a new repository is; one that is there keeps what it is.

    Returns:
        The repository's address.

    Raises:
        UserError: The hub refuses or cannot be reached; the message has the command that tries again.
    """
    require_hub(repo)
    from huggingface_hub import HfApi

    try:
        api = HfApi(library_name="grpo_jax")
        found = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=found.repo_id, folder_path=str(folder), commit_message="A policy trained by grpo_jax")
    except Exception as error:  # of the hub, of HTTP or of the network: each library raises its own
        again = shlex.join(["hf", "upload", repo, str(folder), ".", *(["--private"] if private else [])])
        raise UserError(f"push_to_hub: {_reason(error)}; {folder} is complete, to push it again: {again}") from error
    return str(found)


def _reason(error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is None:
        return f"the hub cannot be reached ({one_line(error) or type(error).__name__})"
    told = getattr(error, "server_message", None) or getattr(response, "reason_phrase", "")
    hint = {401: ", is the token still valid?", 403: ", may this token write there?"}.get(response.status_code, "")
    return f"the hub answered {response.status_code} ({one_line(told)}){hint}"
