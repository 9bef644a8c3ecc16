"""How many pages a model and its draft model get: as many as fit into the memory that all else leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backends import Backends
from .device.overhead import step_overhead
from .facts import wanted_len
from .loaded import Loaded
from .memory import available_bytes
from .pool import PoolSize, bytes_per_token, size_pages

if TYPE_CHECKING:
    from .draft.build import DraftBuild


def size_pool(backends: Backends, loaded: Loaded, draft: DraftBuild | None = None) -> PoolSize:
    """The pool size, common to all ranks and the draft model. Ranks share memory on a CPU, but not on GPUs.

    Raises:
        ConfigError: there is too little memory.
    """
    device, group = backends.device, backends.group
    on_cpu, longest = device.type == "cpu", wanted_len(backends.config, loaded.facts)
    models = [loaded, draft.loaded] if draft else [loaded]
    needed_bytes = draft.scratch_bytes if draft else 0
    if backends.cache.num_pages is not None or on_cpu:
        needed_bytes += loaded.state_bytes
    else:
        # On several ranks, each tries the same steps by itself, like everything else before the first order.
        makes = [each.make_runner if group.size == 1 else each.make_follower for each in models]
        overhead = [step_overhead(make, device, longest) for make in makes if make is not None]
        assert len(overhead) == len(models), "a model on several ranks can follow"
        needed_bytes += sum(overhead)  # which includes the states
    return size_pages(
        backends.cache,
        bytes_per_token=sum(bytes_per_token(each.shapes) for each in models) * (group.size if on_cpu else 1),
        available_bytes=group.least(available_bytes(device) - needed_bytes),
        on_cpu=on_cpu,
        max_live=backends.scheduler.max_live,
        max_model_len=longest,
        may_shrink=backends.config.max_model_len is None,
    )
