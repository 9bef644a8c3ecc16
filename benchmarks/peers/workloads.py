"""The five workloads, given to every engine as the same token ids. Standard library only: runs in any environment.

W1 offline: 32 prompts of 32..512 tokens, 32..128 out. W2 one stream, 128 in, 128 out. W3 one prompt of 1024, one out.
W4 Poisson arrivals of the mix of W1. W5 16 prompts that share 512 tokens, 32 of their own, 32 out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

WORKLOADS = ("W1", "W2", "W3", "W4", "W5")
FIRST_ID, END_ID = 100, 8000  # of the prompts: in every vocabulary, and not special


@dataclass(slots=True)
class Request:
    """A prompt whose answer has exactly ``max_tokens`` tokens, greedy; the end of sequence is ignored."""

    index: int
    prompt: list[int]
    max_tokens: int
    arrival_s: float = 0.0  # W4 only, from the start
    token_times_s: list[float] = field(default_factory=list)  # W4 only, of every token, from the start


def make_requests(workload: str, run: int, *, requests_per_s: float = 1.0) -> list[Request]:
    """Lengths and arrivals depend on the workload, token ids on the run too: no prefix is cached from run to run."""
    shape, tokens = Random(f"{workload}/shape"), Random(f"{workload}/{run}/tokens")

    def prompt(count: int) -> list[int]:
        return [tokens.randrange(FIRST_ID, END_ID) for _ in range(count)]

    match workload:
        case "W1" | "W4":
            requests = [Request(i, prompt(shape.randint(32, 512)), shape.randint(32, 128)) for i in range(32)]
        case "W2":
            requests = [Request(0, prompt(128), 128)]
        case "W2 prefill":  # subtracted from the time of W2
            requests = [Request(0, prompt(128), 1)]
        case "W3":
            requests = [Request(0, prompt(1024), 1)]
        case "W5":
            prefix = prompt(512)
            requests = [Request(i, prefix + prompt(32), 32) for i in range(16)]
        case _:
            raise ValueError(f"workload is {workload!r}, known are: {', '.join(WORKLOADS)}")
    if workload == "W4":
        arrival_s = 0.0
        for request in requests:
            request.arrival_s = arrival_s
            arrival_s += shape.expovariate(requests_per_s)
    return requests
