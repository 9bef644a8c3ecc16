"""The verbs of the command line, whose errors about a value say where it came from, if not from the command line, and
those about a flag of another server what it is called here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import typer

from ...protocol.errors import ConfigError, InvalidRequest
from .aliases import ADDRESS, COMMANDS, INSTEAD, canonical
from .narrow_help import NarrowHelp
from .variables import PREFIX

_UsageError: Any = typer.BadParameter.__base__  # also of an unknown flag, whose own class typer does not export

# Flags whose value may also be a positional argument, and the parameter that then holds it.
_WORDS = {"model": "model_name", "connect": "folder"}


class QuickGroup(typer.core.TyperGroup):
    """The program's own flags and its commands. Switches default to False instead of None, for which typer imports
    pydantic.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if parameter.default is None:
                parameter.default = False
        return parameters

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name our command in the error about one of another program."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if (ours := COMMANDS.get(args[0])) is not None:
                error.message = f"No such command {args[0]!r}. Here: {ours}"
            raise


class Verb(NarrowHelp):
    """A command whose errors name the variable or the file that a value came from."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _sources_named(ctx):
            args = _with_one_address(self, args)
            with _own_flags_named(self, [*args]):  # click takes them out while it parses
                return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _sources_named(ctx):
            return super().invoke(ctx)


@contextmanager
def _sources_named(context: Any) -> Iterator[None]:
    try:
        yield
    except typer.BadParameter as error:
        if error.param is not None and (source := _source(context, error.param)):
            error.param_hint = source
            if getattr(error.param, "is_flag", False):  # typer's message has neither the value nor the choices
                error.message = f"{_text(context, error.param)!r} is neither true nor false"
        raise
    except (ConfigError, InvalidRequest) as error:
        if source := _source(context, _blamed(context, error)):
            raise type(error)(f"{source}: {error.message}", param=error.param) from error
        raise


@contextmanager
def _own_flags_named(command: Any, given: list[str]) -> Iterator[None]:
    """Name our flags in the error about one of another server, and all its others at once: a start command has many.
    Flags that typer finds similar do something else.
    """
    try:
        yield
    except _UsageError as error:
        if hasattr(error, "option_name"):
            unknown = _unknown_flags(command, given) or [error.option_name]
            if len(unknown) > 1 or unknown[0].lstrip("-") in INSTEAD:
                error.message = "\n".join(map(_refusal, unknown)) + "\nSee docs/coming-from.md"
                error.possibilities = ()
        raise


class _Word(NamedTuple):
    """An argument of a command, with what follows it if that is its value."""

    flag: str  # without its value
    value: str
    texts: list[str]
    option: Any  # None unless it is a flag of the command


def _words(command: Any, given: list[str]) -> Iterator[_Word]:
    own = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    texts = iter(given)
    for text in texts:
        if text == "--":
            yield _Word("", "", [text, *texts], None)
            return
        flag, equals, value = text.partition("=")
        option = (own.get(flag) or own.get(f"--{canonical(flag[2:])}")) if flag.startswith("-") else None
        takes_value = flag in ADDRESS if option is None else not option.is_flag
        follows = [] if equals or not takes_value else [*islice(texts, 1)]  # may look like a flag
        yield _Word(flag, "".join(follows) or value, [text, *follows], option)


def _unknown_flags(command: Any, given: list[str]) -> list[str]:
    """The flags among the arguments that the command does not have; of short ones, those known from other servers."""
    flags = dict.fromkeys(word.flag for word in _words(command, given) if word.option is None)
    return [flag for flag in flags if flag.startswith("--") or (flag.startswith("-") and flag[1:] in INSTEAD)]


def _with_one_address(command: Any, given: list[str]) -> list[str]:
    """The arguments with ``--http HOST:PORT`` in place of ``--host`` and ``--port``.

    These have no variables: Kubernetes sets ``TRIPTYCH_PORT`` where a service is called triptych.
    """
    words = list(_words(command, given))
    address = {word.flag: word.value for word in words if word.flag in ADDRESS}
    if not address or all(parameter.name != "http" for parameter in command.params):
        return [*given]
    if any(word.flag == "--http" for word in words):
        raise typer.BadParameter(f"{' and '.join(address)} beside --http, which is the whole address")
    host, port = ({**ADDRESS, **address}[flag] for flag in ADDRESS)
    rest = [text for word in words if word.flag not in ADDRESS for text in word.texts]
    return ["--http", f"[{host}]:{port}" if ":" in host else f"{host}:{port}", *rest]


def _refusal(flag: str) -> str:
    ours = INSTEAD.get(flag.lstrip("-"))
    return f"No such option: {flag}" + (f". Here: {ours}" if ours else "")


def _blamed(context: Any, error: ConfigError | InvalidRequest) -> Any:
    """The parameter that an error is about: the one it names, or the first word of its message."""
    name = error.param or error.message.partition(" ")[0]
    if context.params.get(_WORDS.get(name)) is not None:
        return None
    parameters = (p for p in context.command.params if p.envvar == PREFIX + name.upper())
    return next(parameters, None)


def _source(context: Any, parameter: Any) -> str | None:
    """Where the value of a parameter came from; None for the command line and for a default."""
    source = context.get_parameter_source(parameter.name) if parameter is not None else None
    if source is not None and source.name == "ENVIRONMENT":
        return f"{parameter.envvar} in the environment"
    if source is not None and source.name == "DEFAULT_MAP":
        return f"{parameter.name} in {context.params['config_file']}"
    return None


def _text(context: Any, parameter: Any) -> str:
    """The value as given there."""
    from_environment = parameter.value_from_envvar(context)
    return str(from_environment if from_environment is not None else context.lookup_default(parameter.name))
