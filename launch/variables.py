"""Environment variables that look like flags and are none: a setting that is mistyped would be lost in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator

from .aliases import ALIASES

PREFIX = "TRIPTYCH_"
# Of programs beside the command line: benchmarks, and tests of other people's clients.
ELSEWHERE = frozenset({"TRIPTYCH_BENCH_DIR", "TRIPTYCH_CLIENTS", "TRIPTYCH_PEERS"})
# Kubernetes tells every pod of every service: one that is called triptych comes as TRIPTYCH_PORT_8000_TCP.
_OF_KUBERNETES = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")


def complaints(environment: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """A line for each variable that somebody meant for us and nobody reads; ``known`` are those of the flags."""
    names = {name.removeprefix(PREFIX): name for name in known}
    aliases = {alias.upper().replace("-", "_"): own.upper().replace("-", "_") for alias, own in ALIASES.items()}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and name not in ELSEWHERE and not _OF_KUBERNETES.search(name):
            flag = name.removeprefix(PREFIX)
            close = difflib.get_close_matches(aliases.get(flag, flag), names, 1)
            hint = f"; did you mean {names[close[0]]}?" if close else ""
            yield f"{name} in the environment is not a flag{hint}"
