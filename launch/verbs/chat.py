"""``triptych chat``: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...driver.stream import Completion
from ...protocol.config import PipelineConfig
from ...protocol.errors import ConfigError, InvalidRequest, RequestError
from ..pipeline import Pipeline, open_pipeline
from ..terminal.chat_lines import BLOCK, line_editing, read_message
from ..terminal.not_utf8 import why_not_utf8
from ..terminal.report import ledger_table, model_line, printable, say, summary_line

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "where the time of the last answer went",
    "/system": "[TEXT]  show or change the system message; - removes it",
    "/save": "FILE  save the conversation: messages in FILE.json, else Markdown",
    "/help": "this list",
    "/quit": "quit, as does Ctrl-D; Ctrl-C ends an answer",
}
HELP = "\n".join(f"{name:<8} {text}" for name, text in COMMANDS.items()) + (
    f"\nA \\ at the end of a line continues it on the next; {BLOCK} encloses several lines."
)


class NoAnswer(RequestError):
    """The user did not want to wait any longer for the end of an answer."""

    code = "no_answer"


def chat(
    config: PipelineConfig,
    options: Mapping[str, Any],
    *,
    system: str | None,
    run_dir: Path | None,
    connect: Path | None,
    console: Console,
) -> int:
    """Chat until the input ends; ``options`` apply to every request. The exit code is 1 if the questions came through a
    pipe and one of them was refused.

    Raises:
        ConfigError: the model has no chat template.
    """
    with open_pipeline(config, run_dir=run_dir, connect=connect, console=console) as pipeline:
        if not pipeline.has_chat_template:
            raise ConfigError("this model has no chat template; try triptych generate --raw", param="model")
        is_typed = sys.stdin.isatty()
        if is_typed:
            say(console, model_line(pipeline.client.info()["model"]), is_wrapped=True)
            say(console, "/help lists the commands")
        conversation = Conversation(pipeline, options, system=system, console=console)
        with line_editing([*COMMANDS]) if is_typed else nullcontext():
            conversation.run()
    return 1 if conversation.was_refused and not is_typed else 0


class Conversation:
    """The messages so far. An aborted answer is kept as far as it came; a refused question is dropped."""

    def __init__(self, pipeline: Pipeline, options: Mapping[str, Any], *, system: str | None, console: Console) -> None:
        self._pipeline, self._options, self._console = pipeline, options, console
        self._system = system
        self._messages: list[dict[str, str]] = []  # without the system message
        self._last: Completion | None = None
        self.was_refused = False

    def run(self) -> None:
        while (message := read_message()) is not None:
            command, _, rest = message.strip().partition(" ")
            match command:
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._messages = []
                    self._say("The conversation is forgotten.")
                case "/stats":
                    self._show_stats()
                case "/system":
                    self._change_system(rest.strip())
                case "/save":
                    self._save(rest.strip())
                case "/help":
                    self._say(HELP)
                case "":
                    pass
                case _ if command.startswith("/") and not rest:
                    self._say(f"{command} is not a command\n{HELP}")
                case _:
                    self._ask(message.strip())

    @property
    def _opening(self) -> list[dict[str, str]]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _ask(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        try:
            _check_utf8(question)
            self._last = self._stream([*self._opening, *messages])
        except RequestError as error:
            self.was_refused = True
            self._say(f"{error.message} ({error.code}); /reset forgets the conversation", "red")
            return
        self._messages = [*messages, {"role": "assistant", "content": self._last.text}]
        if self._console.is_terminal:
            self._say(summary_line(self._last))

    def _stream(self, messages: list[dict[str, str]]) -> Completion:
        """Print the answer as it arrives; Ctrl-C aborts it, a second one also stops waiting for its end."""
        stream = self._pipeline.client.submit(messages=messages, **self._options)
        is_aborted = False
        while True:
            try:
                for delta in stream:
                    print(printable(delta.text), end="", flush=True)
                print(flush=True)
                return stream.result()
            except KeyboardInterrupt:
                if is_aborted:
                    print(flush=True)
                    raise NoAnswer("the pipeline did not respond") from None
                is_aborted = True
                stream.abort()  # its last tokens still arrive, with the finish reason "abort"

    def _show_stats(self) -> None:
        if self._last is None:
            self._say("There is no answer yet.")
            return
        self._console.print(ledger_table({"last answer": self._last.ledger}))
        usage = self._last.usage
        self._say(f"{usage['prompt_tokens']} prompt tokens, {usage['cached_tokens']} of them cached")

    def _change_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        self._say(f"system: {self._system or 'nothing'}")

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save needs a file name", "red")
            return
        path = Path(os.path.expanduser(name))  # of an unknown user it stays as it is
        messages = [*self._opening, *self._messages]
        text = json.dumps(messages, indent=1, ensure_ascii=False) if path.suffix == ".json" else _markdown(messages)
        try:
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")
        except OSError as error:
            self._say(f"cannot write {path}: {error.strerror}", "red")
        else:
            self._say(f"{len(messages)} messages saved to {path}")

    def _say(self, text: str, style: str = "dim") -> None:
        say(self._console, text, style, is_wrapped=True)


def _markdown(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(f"**{message['role']}**\n\n{message['content']}" for message in messages)


def _check_utf8(text: str) -> None:
    """
    Raises:
        InvalidRequest: standard input, which is read as UTF-8, contained something else.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = why_not_utf8(text.encode(errors="surrogateescape"))
        raise InvalidRequest(f"the question is {reason}", param="messages") from error
