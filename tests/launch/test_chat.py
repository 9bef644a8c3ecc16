"""``triptych chat`` through a pipe."""

from __future__ import annotations

from tests.launch.conftest import Outcome, Triptych
from triptych import Client


def chat(triptych: Triptych, run_dir: str, *lines: str, flags: tuple[str, ...] = ()) -> Outcome:
    return triptych("chat", "--connect", run_dir, "--max-tokens", "4", *flags, stdin="\n".join(lines).encode())


def answers(run_dir: str, *questions: str, system: str | None = None) -> str:
    """What the model says to the questions of one conversation, a line each."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    with Client(run_dir) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            texts.append(client.generate(messages=messages, max_tokens=4, logit_bias={50: 100.0}).text)
            messages.append({"role": "assistant", "content": texts[-1]})
    return "".join(text + "\n" for text in texts)
