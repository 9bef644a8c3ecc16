"""Mutations that need adapters; see ``mutations.py``."""

from __future__ import annotations

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.journal.requests import RequestView
from triptych.protocol.record import RequestRecord
from triptych.workers.execute.bookkeeping import Bookkeeper
from triptych.workers.execute.scheduling.sequence import Sequence


def adapters_share_their_prefixes(patch: Patch) -> None:
    patch.setattr(RequestRecord, "prefix_salt", property(lambda self: self.cache_salt))


def recovered_request_continues_without_its_adapter(patch: Patch) -> None:
    real = Bookkeeper.adopt

    def adopt(self: Bookkeeper, view: RequestView) -> Sequence:
        sequence = real(self, view)
        sequence.adapter *= not sequence.num_output_tokens
        return sequence

    patch.setattr(Bookkeeper, "adopt", adopt)


ADAPTER_MUTATIONS = by_name(adapters_share_their_prefixes, recovered_request_continues_without_its_adapter)
