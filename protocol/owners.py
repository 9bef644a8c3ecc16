"""Ownership of requests: the holder of a key follows, aborts and lists what was submitted with that key."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from .config import ServiceConfig
from .keys import own_keys

HOUSE = 0  # anyone who can read the run directory: its requests belong to no key, and it may access every request


class Owners:
    """Numbers for the owners of connections, the same across restarts of the service."""

    def __init__(self, run_dir: Path, service: ServiceConfig) -> None:
        self._are_told_apart = service.curve_keys is not None and not service.share_requests
        keys = own_keys(run_dir) if self._are_told_apart else None
        self._house = b"" if keys is None else keys.public.encode()

    def number(self, owner: bytes) -> int:
        """The number of ``owner``, a result of ``Router.owner``."""
        if not self._are_told_apart or owner == self._house:
            return HOUSE
        return int.from_bytes(blake2b(owner, digest_size=8).digest(), "big") or 1


def may_ask(asker: int, owner: int) -> bool:
    """Whether ``asker`` may follow, abort and list the requests of ``owner``."""
    return asker in (HOUSE, owner)
