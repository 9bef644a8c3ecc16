"""Where a service accepts clients: in the run directory, or at one TCP address for holders of keys."""

from __future__ import annotations

import ipaddress
import re

from .errors import ConfigError

_TCP = re.compile(r"tcp://(?P<host>[^:/\[\]]+|\[[^\]]*\]):(?P<port>[0-9]{1,5})")
_EVERYWHERE = ("*", "[*]")
_ZEROS = re.compile(r"0[0x.]*", re.IGNORECASE)  # 0.0.0.0 in any spelling that the system's resolver accepts


def check_endpoint(name: str, endpoint: str | None, *, has_keys: bool) -> None:
    """
    Raises:
        ConfigError: the endpoint is malformed or must not be served.
    """
    if endpoint is None or endpoint.startswith("ipc://"):
        return
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise ConfigError(f"{name} is {endpoint!r}, the forms are ipc://PATH and tcp://HOST:PORT", param=name)
    if _is_everywhere(match["host"]):
        raise ConfigError(f"{name} is {endpoint!r}: give a single address, not a wildcard", param=name)
    if not 1 <= (port := int(match["port"])) <= 65535:
        raise ConfigError(f"the port of {name} is {port}, the limits are 1 and 65535", param=name)
    if not has_keys:
        raise ConfigError(
            f"{name} is {endpoint!r}: tcp:// requires keys, make them with triptych keys init and pass their folder as"
            " curve_keys",
            param=name,
        )


def _is_everywhere(host: str) -> bool:
    """Whether a server bound to this host listens on every address of the machine."""
    if host in _EVERYWHERE or _ZEROS.fullmatch(host):
        return True
    try:
        address = ipaddress.IPv6Address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_unspecified or (address.ipv4_mapped is not None and address.ipv4_mapped.is_unspecified)
