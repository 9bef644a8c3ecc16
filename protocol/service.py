"""What whoever serves a public socket says of the service, and whom it lets in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import ServiceConfig
from .curve import PublicDoor
from .keys import KeyFolder, allow_list
from .model_card import ModelCard


def service_info(run_dir: Path, service: ServiceConfig) -> dict[str, Any]:
    """The map of INFO. The card is read each time: execute may have been restarted with other weights. It is empty for
    a pipeline that was given up before there was any.
    """
    limits = {
        "max_queue": service.max_queue,
        "max_client_requests": service.max_client_requests,
        "max_frame_bytes": service.max_frame_bytes,
        "window_tokens": service.window_tokens,
        "lease_s": service.lease_s,
    }
    card = ModelCard.read(run_dir)
    return {"model": {} if card is None else card.to_wire(), "limits": limits}


def public_door(run_dir: Path, service: ServiceConfig, endpoint: str | None) -> PublicDoor | None:
    """How a socket for clients is opened to the network, if ``endpoint`` says that it is."""
    if service.curve_keys is None:
        return None
    keys = KeyFolder(service.curve_keys)
    public = endpoint if endpoint is not None and endpoint.startswith("tcp://") else None
    return PublicDoor(public, keys.server.secret, allow_list(keys, run_dir))
