"""The records of an admitted request, one for each of its sequences."""

from __future__ import annotations

import secrets
from dataclasses import replace

from ...protocol.owners import HOUSE
from ...protocol.reasoning import to_wire
from ...protocol.record import RequestRecord
from ...protocol.request_ids import member_id, member_seed
from .admission import Admission
from .intake import Intake


def make_records(intake: Intake, admission: Admission, *, lease_s: float, lora_digest: str) -> list[RequestRecord]:
    """``lease_s`` applies unless the request has its own. A request without a seed gets a random one."""
    request, params = intake.request, intake.request.sampling
    first = RequestRecord(
        request_id=member_id(intake.request_id, 0, params.group_size),
        owner=intake.owner if isinstance(intake.owner, int) else HOUSE,
        digest=intake.digest,
        prompt=admission.token_ids.astype("<i4").tobytes(),
        num_truncated_tokens=admission.num_truncated,
        token_capacity=admission.capacity,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        lease_s=request.lease_s or lease_s,
        priority=request.priority,
        cache_salt=request.cache_salt,
        lora=request.lora,
        lora_digest=lora_digest,
        deadline_at=intake.time_after(request.deadline_ms),
        queue_deadline_at=intake.time_after(request.max_queue_ms),
        return_prompt=request.return_prompt,
        sampling=params.to_wire(),
        grammar=intake.grammar,
        reasoning=to_wire(intake.reasoning) if intake.reasoning else None,
        continues_prompt=intake.continues_prompt,
        embedding_size=admission.embedding_size,
    )
    return [_member(first, intake.request_id, index) for index in range(params.group_size)]


def _member(first: RequestRecord, request_id: str, index: int) -> RequestRecord:
    """The record of sequence ``index``, derived from that of the first."""
    size = first.params.group_size
    seed = member_seed(first.seed, index)
    return replace(first, request_id=member_id(request_id, index, size), seed=seed, index=index)
