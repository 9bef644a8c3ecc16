"""Makes certain requests crash workers. Python imports this file itself if the folder is on PYTHONPATH.

A prompt whose ids contain ``[SPARE, kind]`` makes execute do what ``KINDS[kind]`` says, ``[SPARE, kind, n]`` with
``n >= FROM_OUTPUT`` only once it has ``n - FROM_OUTPUT`` output tokens; the text ``<<kind>>`` does this to prepare, and
the token id in ``TRIPTYCH_FATAL_TOKEN`` to summarize.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

SPARE = 257
FROM_OUTPUT = 100
KINDS = {1: "raise", 2: "abort", 3: "segv", 4: "hang", 5: "nan", 6: "exit", 7: "memory"}


def harm(kind: str) -> None:
    if kind == "raise":
        raise ValueError("poison")
    if kind == "memory":
        raise MemoryError("poison")
    if kind == "hang":
        time.sleep(3600)
    if kind == "exit":
        os._exit(9)
    if kind in ("abort", "segv"):
        os.kill(os.getpid(), signal.SIGABRT if kind == "abort" else signal.SIGSEGV)
        time.sleep(3600)


def kind_of(sequence: Any) -> str | None:
    prompt = sequence.tokens[: sequence.num_prompt_tokens].tolist()
    if SPARE not in prompt[:-1]:
        return None
    at = prompt.index(SPARE)
    begin = prompt[at + 2] - FROM_OUTPUT if at + 2 < len(prompt) else 0
    return KINDS.get(prompt[at + 1]) if sequence.num_output_tokens >= begin else None


def poison_execute() -> None:
    from dataclasses import replace

    from triptych.workers.execute.hash_lm import HashRunner

    launch = HashRunner.launch

    def launch_or_die(self: Any, inputs: Any) -> None:
        kinds = {row: kind for row, s in enumerate(inputs.sampled) if (kind := kind_of(s))}
        for kind in kinds.values():
            harm(kind)
        launch(self, inputs)
        if failed := {row: "the logits are not finite" for row, kind in kinds.items() if kind == "nan"}:
            self._results[-1] = replace(self._results[-1], failed=failed)

    HashRunner.launch = launch_or_die  # type: ignore[method-assign]


def poison_prepare() -> None:
    from triptych.workers.prepare.text_encoder import TextEncoder

    encode = TextEncoder.encode

    def encode_or_die(self: Any, text: str) -> Any:
        if found := re.search("<<(.*?)>>", text):
            harm(found[1])
        return encode(self, text)

    TextEncoder.encode = encode_or_die  # type: ignore[method-assign]


def poison_summarize() -> None:
    from triptych.workers.summarize.answer import Answer

    push, fatal = Answer.push, int(os.environ["TRIPTYCH_FATAL_TOKEN"])

    def push_or_die(self: Any, token_ids: Sequence[int], now_ns: int) -> None:
        if fatal in token_ids:
            harm("abort")
        push(self, token_ids, now_ns)

    Answer.push = push_or_die  # type: ignore[method-assign]


def is_of(role: str) -> bool:
    """Whether this process is a worker of that role, or forks them."""
    module = f"triptych.workers.{role}"
    return module in sys.orig_argv or ("triptych.workers.fork_server" in sys.orig_argv and role in sys.orig_argv)


if is_of("execute"):
    poison_execute()
if is_of("prepare"):
    poison_prepare()
if is_of("summarize") and "TRIPTYCH_FATAL_TOKEN" in os.environ:
    poison_summarize()
