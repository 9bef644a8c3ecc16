"""Reports environment variables that look like flags but are not: a mistyped setting would be ignored silently."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import typer

from ...protocol.spelling import did_you_mean
from .aliases import ALIASES

logger = logging.getLogger(__name__)

PREFIX = "TRIPTYCH_"
# Of programs other than the command line: benchmarks, and tests of other projects' clients.
ELSEWHERE = frozenset({"TRIPTYCH_BENCH_DIR", "TRIPTYCH_CLIENTS", "TRIPTYCH_PEERS"})
# Kubernetes describes every service to every pod: for one called triptych, with variables like TRIPTYCH_PORT_8000_TCP.
_OF_KUBERNETES = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")


def complaints(environment: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """A line for each variable with our prefix that nothing reads; ``known`` are those of the flags."""
    names = [name.removeprefix(PREFIX) for name in known]
    aliases = {alias.upper().replace("-", "_"): own.upper().replace("-", "_") for alias, own in ALIASES.items()}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and name not in ELSEWHERE and not _OF_KUBERNETES.search(name):
            flag = name.removeprefix(PREFIX)
            hint = did_you_mean(aliases.get(flag, flag), names, prefix=PREFIX)
            yield f"{name} in the environment is not a flag{hint}"


def warn_of_unknown(app: typer.Typer) -> None:
    """Log those of this process that no flag of ``app`` reads."""
    if not any(name.startswith(PREFIX) for name in os.environ):
        return  # collecting all flags takes a tenth of a second
    verbs: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {parameter.envvar for verb in verbs.values() for parameter in verb.params if parameter.envvar}
    for complaint in complaints(os.environ, known):
        logger.warning("%s", complaint)
