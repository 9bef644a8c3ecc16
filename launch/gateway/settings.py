"""The settings that a supervised gateway process receives from its supervisor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .config import GatewayConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Passed through standard input, as keys must not be visible in the list of processes."""

    config: GatewayConfig
    run_dir: Path
    index: int
    listen_fd: int
    heartbeat_fd: int
    log_level: str

    def to_json(self) -> str:
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return json.dumps({**plain, "config": asdict(self.config), "run_dir": str(self.run_dir)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        plain = json.loads(text)
        config: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain["config"].items()}
        return cls(**{**plain, "config": GatewayConfig(**config), "run_dir": Path(plain["run_dir"])})
