"""What the processes with a public socket report about the service, and whom they admit."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from .config import ServiceConfig
from .curve import CurveServer
from .keys import KeyFolder, allow_list
from .model_card import ModelCard


def service_info(run_dir: Path, service: ServiceConfig) -> dict[str, Any]:
    """The content of INFO. The card is read each time, as a restarted execute may have other weights. "model" is empty
    for a pipeline that failed before there was a card.
    """
    limits = {
        "max_queue": service.max_queue,
        "max_client_requests": service.client_requests,
        "max_frame_bytes": service.max_frame_bytes,
        "window_tokens": service.window_tokens,
        "lease_s": service.lease_s,
        "max_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # the workers raise theirs to it
    }
    card = ModelCard.read(run_dir)
    return {"model": {} if card is None else card.to_wire(), "limits": limits}


def curve_server(run_dir: Path, service: ServiceConfig, endpoint: str | None) -> CurveServer | None:
    """How a client socket accepts connections from the network; None if no keys are configured."""
    if service.curve_keys is None:
        return None
    keys = KeyFolder(service.curve_keys)
    public = endpoint if endpoint is not None and endpoint.startswith("tcp://") else None
    return CurveServer(public, keys.server.secret, allow_list(keys, run_dir))
