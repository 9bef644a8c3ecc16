"""A checkpoint on the Hugging Face hub: its local copy, downloaded if needed, or one sentence why there is none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from .....protocol.errors import ConfigError

logger = logging.getLogger(__name__)

WAITS_S = (1.0, 4.0)  # before each retry, if retrying may help
_FILES = ["*.json", "*.safetensors", "*.model", "*.model.v3", "*.txt", "*.jinja"]
_DUPLICATES = ["consolidated*", "original/*", "onnx/*"]


def fetch(model: str, *, sleep: Callable[[float], None] = time.sleep) -> Path:
    """Return the local directory of the checkpoint that the hub knows as ``model``, downloading it if needed.

    Raises:
        ConfigError: the hub has no such repository, denies this user access to it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # here: a local checkpoint does not need it

    waits_s = list(WAITS_S)
    while True:
        try:
            return Path(snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_DUPLICATES))
        except Exception as error:  # the errors of its HTTP client have no public base class
            reason = _final_reason(error)
            if reason is None and waits_s:
                logger.warning("the hub does not respond: %s; trying again in %.0f s", first_line(error), waits_s[0])
                sleep(waits_s.pop(0))
                continue
            reason = reason or f"the hub cannot be reached: {first_line(error)}"
            raise ConfigError(f"{model!r} is not a local directory, and {reason}", param="model") from error


def _final_reason(error: Exception) -> str | None:
    """Explain why retrying is pointless; None if the network may be to blame."""
    from huggingface_hub import constants, errors

    match error:
        case errors.GatedRepoError():
            return "its repository is gated: accept its terms on its page, and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "the hub has no such repository (for a private one set HF_TOKEN)"
        case errors.HfHubHTTPError() if error.response.status_code < 500 and error.response.status_code != 429:
            return f"the hub refuses it: {first_line(error)}"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set, and the hub's cache on this machine has no copy"
        case ValueError():
            return f"it is not a valid hub id: {first_line(error)}"
    is_local = isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)
    return f"its files cannot be stored: {first_line(error)}" if is_local else None


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
