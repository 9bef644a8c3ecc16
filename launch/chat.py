"""``triptych chat``: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..driver.stream import Completion
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError, RequestError
from ..protocol.sampling import SamplingParams
from .pipeline import Pipeline, open_pipeline
from .report import ledger_table, model_line, printable, say, summary_line

if TYPE_CHECKING:
    from rich.console import Console

PROMPT = "> "
HELP = """\
/reset  forget the conversation
/stats  where the time of the last answer went
/help   this list
/quit   leave, as does Ctrl-D; Ctrl-C ends an answer"""


def chat(
    config: PipelineConfig,
    params: SamplingParams,
    *,
    system: str | None,
    run_dir: Path | None,
    connect: Path | None,
    console: Console,
) -> int:
    """Talk until the input ends. The exit code is 0.

    Raises:
        ConfigError: the model has no chat template.
    """
    with open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline:
        if not pipeline.has_chat_template:
            raise ConfigError("this model has no chat template; try triptych generate --raw", param="model")
        if sys.stdin.isatty():
            import readline  # noqa: F401  gives input() its line editing and history

            say(console, model_line(pipeline.client.info()["model"]))
            say(console, "/help lists the commands")
        Conversation(pipeline, params, system=system, console=console).run()
    return 0


class Conversation:
    """The messages so far. An answer that was aborted stays as far as it came; a refused question is forgotten."""

    def __init__(self, pipeline: Pipeline, params: SamplingParams, *, system: str | None, console: Console) -> None:
        self._pipeline, self._params, self._console = pipeline, params, console
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._opening]
        self._last: Completion | None = None

    def run(self) -> None:
        while (line := _read_line()) is not None:
            match line.strip():
                case "":
                    pass
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._messages = [*self._opening]
                    say(self._console, "The conversation is forgotten.")
                case "/stats":
                    self._show_stats()
                case "/help":
                    say(self._console, HELP)
                case command if command.startswith("/") and " " not in command:
                    say(self._console, f"{command} is no command\n{HELP}")
                case question:
                    self._ask(question)

    def _ask(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        try:
            self._last = self._stream(messages)
        except RequestError as error:
            say(self._console, f"{error.message} ({error.code}); /reset forgets the conversation", "red")
            return
        self._messages = [*messages, {"role": "assistant", "content": self._last.text}]
        if self._console.is_terminal:
            say(self._console, summary_line(self._last))

    def _stream(self, messages: list[dict[str, str]]) -> Completion:
        """Write the answer as it comes; Ctrl-C ends it."""
        stream = self._pipeline.client.submit(messages=messages, **self._params.to_wire())
        while True:
            try:
                for delta in stream:
                    print(printable(delta.text), end="", flush=True)
                print(flush=True)
                return stream.result()
            except KeyboardInterrupt:
                stream.abort()  # its last words still come, and the finish reason "abort"

    def _show_stats(self) -> None:
        if self._last is None:
            say(self._console, "There was no answer yet.")
        else:
            self._console.print(ledger_table({"last answer": self._last.ledger}))


def _read_line() -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            if sys.stdin.isatty():
                return input(PROMPT)
            return sys.stdin.readline() or None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()  # as in a shell: the line is given up, not the program
