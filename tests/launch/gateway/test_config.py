from __future__ import annotations

from typing import Any

import pytest

from triptych.launch.gateway.config import MAX_WORKERS, GatewayConfig
from triptych.protocol.errors import ConfigError

LIMITS = {
    "http_workers": (1, MAX_WORKERS),
    "max_body_bytes": (1 << 10, 1 << 30),
    "body_timeout_s": (0.1, 1e6),
    "keep_alive_s": (0, 1e6),
    "stream_interval": (1, 1 << 20),
    "resume_s": (0.05, 86400.0),
    "request_timeout_s": (0.01, 1e9),
}


@pytest.mark.parametrize(("name", "limits"), LIMITS.items(), ids=LIMITS)
def test_number_beyond_its_limits_is_refused(name: str, limits: tuple[Any, Any]) -> None:
    for value in limits:
        assert getattr(GatewayConfig(**{name: value}), name) == value
    for value in (limits[0] - 0.5, limits[1] * 2):
        with pytest.raises(ConfigError, match=f"{name} is {value}, the limits are") as caught:
            GatewayConfig(**{name: value})
        assert caught.value.param == name
