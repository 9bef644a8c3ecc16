"""The pipeline as a Ray Serve application: each replica is an actor with one pipeline, which serves the gateway's app.

    serve run triptych.launch.ray_app:app model=/models/model min_replicas=2 max_replicas=8

Needs ``pip install 'triptych[http,ray]'``. Ray starts replicas, counts the requests of each, and replaces unhealthy
ones; inside a replica everything works as under ``triptych serve``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from ..driver.driver import Driver
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError
from .gateway.app import create_app
from .gateway.config import GatewayConfig
from .gateway.serving.processes import check_installed
from .gateway.serving.server import make_gateway

# Ray's PrefixCacheAffinityRouter looks for the prompt in the arguments of a Python call and raises if there is none.
# Its HTTP proxy chooses a replica before it reads the body, so over HTTP only a header can identify related requests.
_ROUTERS = {
    "load": RequestRouterConfig(),
    "session": RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options for Ray's management of the replicas."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 32.0  # waiting and running per replica; above it another one is started
    max_requests: int = 256  # per replica; more wait in Ray's proxy
    router: str = "load"  # or "session": requests with the same x-session-id go to the replica that has their pages
    num_cpus: float = 1.0
    num_gpus: float = 0.0  # tensor_parallel_size, on GPUs

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(f"min_replicas is {self.min_replicas}, the limits are 1 and {self.max_replicas}")
        if self.router not in _ROUTERS:
            raise ConfigError(f"router is {self.router!r}, known are: {', '.join(_ROUTERS)}")


class Replica:
    """One pipeline, and the ASGI app in front of it."""

    def __init__(self, config_json: str) -> None:
        check_installed()
        config = PipelineConfig.from_json(config_json)
        self._patience_s = config.supervisor.start_timeout_s
        self._well_at = time.monotonic()
        self._driver = Driver(config=config)
        self._driver.start()
        self._gateway = make_gateway(GatewayConfig(), self._driver.run_dir)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._gateway)

    def check_health(self) -> None:
        """Raises if the driver gave up, or a worker has been down for longer than a start may take.

        A worker that died is not yet a reason: its pipeline restarts it, without losing requests.
        """
        now = time.monotonic()
        if self._driver.healthy:
            self._well_at = now
        elif now - self._well_at > self._patience_s:
            raise RuntimeError(f"not healthy for {now - self._well_at:.0f} s: {self._driver.phases}")

    def __del__(self) -> None:
        if hasattr(self, "_driver"):
            self._driver.stop()


def app(arguments: dict[str, Any]) -> Any:
    """The application, for ``serve run`` and ``serve.run``: fields of ``RayOptions`` and of ``PipelineConfig``.

    Raises:
        ConfigError: an option is unknown, or a value is out of range.
    """
    values = {name: _value(given) for name, given in arguments.items()}
    names = {field.name for field in dataclasses.fields(RayOptions)}
    options = RayOptions(**{name: values.pop(name) for name in names & values.keys()})
    config = PipelineConfig.from_options(**values)
    GatewayConfig().check_names(config.model)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="triptych",
        max_ongoing_requests=options.max_requests,
        graceful_shutdown_timeout_s=60.0,
        health_check_period_s=5.0,
        request_router_config=_ROUTERS[options.router],
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_requests,
        ),
    )
    return deployment.bind(config.to_json())


def _value(given: Any) -> Any:
    """``serve run`` passes strings: parse numbers, true, false and null."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given
