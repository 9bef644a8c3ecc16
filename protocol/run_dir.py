"""What lies where in the run directory of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard

from .board import ROLES
from .channels import inbox_endpoint, ipc_endpoint
from .config import PipelineConfig, ServiceConfig
from .errors import ConfigError

CONFIG_FILE = "config.json"
ADAPT_FILE = "execute.adapt"  # while execute should take up the adapters of the settings
JOURNAL_FILE = "journal"
SUBMIT_SOCKET, FOLLOW_SOCKET = "submit", "follow"  # for clients, unless the settings name other ones


def read_config(run_dir: Path) -> PipelineConfig:
    """The configuration of the pipeline that runs, or ran, in ``run_dir``.

    Raises:
        OSError: there is none.
        ConfigError: this version cannot read it.
    """
    file = run_dir / CONFIG_FILE
    try:
        return PipelineConfig.from_json(file.read_text(encoding="utf-8"))
    except (ValueError, ConfigError) as error:
        text = f"{file} was written by another version of Triptych, or changed: {error}"
        raise ConfigError(text, param="run_dir") from error


def submit_endpoint(run_dir: Path, service: ServiceConfig) -> str:
    """Where clients on this machine connect; a tcp:// endpoint is additional and does not replace it."""
    return service.submit if _is_ipc(service.submit) else ipc_endpoint(run_dir / SUBMIT_SOCKET)


def follow_endpoint(run_dir: Path, service: ServiceConfig) -> str:
    return service.follow if _is_ipc(service.follow) else ipc_endpoint(run_dir / FOLLOW_SOCKET)


def _is_ipc(endpoint: str | None) -> TypeGuard[str]:
    return endpoint is not None and endpoint.startswith("ipc://")


def journal_path(run_dir: Path, service: ServiceConfig) -> Path:
    return Path(service.journal).absolute() if service.journal else run_dir / JOURNAL_FILE


def kv_path(run_dir: Path) -> Path:
    """The KV pool of execute: a link to memory that the driver holds."""
    return run_dir / "kv"


def weights_path(run_dir: Path) -> Path:
    """The packed weights of execute: likewise."""
    return run_dir / "weights"


def board_path(run_dir: Path) -> Path:
    return run_dir / "board"


def control_path(run_dir: Path) -> Path:
    """Where the control socket of a run directory is.

    Raises:
        ConfigError: the path is too long for a Unix socket.
    """
    ipc_endpoint(run_dir / "control")
    return run_dir / "control"


def check_socket_paths(run_dir: Path) -> None:
    """
    Raises:
        ConfigError: the path of the socket with the longest name is too long.
    """
    inbox_endpoint(run_dir, max(ROLES, key=len))
