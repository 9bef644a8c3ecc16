"""The command line. A verb's own module is imported when the verb runs, so that ``--help`` costs next to nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .. import __version__
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError, InvalidRequest, TriptychError
from ..protocol.sampling import SamplingParams
from .failures import explain
from .flags import ENV_PREFIX, OutputFormat, given_flags, option, with_flags
from .logs import set_up_logging
from .signals import exit_on_signals

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = f"Every flag can also be an environment variable: {ENV_PREFIX}PAGE_SIZE=32 is --page-size 32."

ModelName = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="the same as --model")]
RunDir = Annotated[
    Path | None, option("run_dir", "for sockets, journal and logs; by default a private one that is removed")
]
Connect = Annotated[Path | None, option("connect", "use the pipeline that runs in this run directory")]
LogLevel = Annotated[str, option("log_level", "debug, info, warning or error")]

app = typer.Typer(
    name="triptych",
    help="An LLM inference driver in three processes that never loses a request.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a verb and exit: with 0 if all went well, 1 if something failed, 2 for a wrong setting."""
    exit_on_signals()
    try:
        app(arguments)
    except TriptychError as error:
        typer.secho(f"error: {explain(error)}", fg="red", err=True)
        sys.exit(2 if isinstance(error, (ConfigError, InvalidRequest)) else 1)
    raise AssertionError("typer exits when a verb has ended")


@app.callback(invoke_without_command=True)
def triptych(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"triptych {__version__}")
        raise typer.Exit


@app.command(epilog=EPILOG)
@with_flags
def serve(
    *,
    model_name: ModelName = None,
    config: PipelineConfig,
    run_dir: RunDir = None,
    drain_timeout: Annotated[float, option("drain_timeout", "seconds that accepted requests get at a stop")] = 30.0,
    log_level: LogLevel = "info",
) -> None:
    """Serve clients until Ctrl-C or SIGTERM: the first one drains, the second one stops at once."""
    from .serve import serve

    config = _with_model(config, model_name)
    raise typer.Exit(serve(config, run_dir=run_dir, drain_timeout=drain_timeout, console=_console(log_level)))


@app.command(epilog=EPILOG)
@with_flags
def generate(
    context: typer.Context,
    *,
    prompts: Annotated[list[str] | None, typer.Argument(help="by default the lines of --file, or of stdin")] = None,
    file: Annotated[
        Path | None, option("file", "a prompt a line, or a JSON object; - is stdin", "--file", "-f")
    ] = None,
    output: Annotated[
        Path | None, option("output", "replaced if it exists; by default stdout", "--output", "-o")
    ] = None,
    output_format: Annotated[
        OutputFormat | None, option("format", "by default jsonl for --output *.jsonl, else text", "--format")
    ] = None,
    chat: Annotated[
        bool | None,
        option("chat", "through the chat template or not; by default if the model has one", "--chat/--raw"),
    ] = None,
    stream: Annotated[
        bool | None, option("stream", "as it comes; by default one prompt on a terminal", "--stream/--no-stream")
    ] = None,
    params: SamplingParams,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Answer prompts. One that fails stops no other; its row tells why, and the exit code is 1.

    A line that begins with {" is JSON: prompt, prompt_token_ids or messages, and any sampling parameter.
    """
    from .generate import Task, generate
    from .output import choose_format

    _refuse_config_flags(context, connect)
    task = Task(
        prompts=prompts or [],
        file=file,
        output=output,
        output_format=choose_format(output_format, output),
        chat=chat,
        stream=stream,
        params=params,
    )
    raise typer.Exit(generate(task, config, run_dir=run_dir, connect=connect, console=_console(log_level)))


@app.command(epilog=EPILOG)
@with_flags
def chat(
    context: typer.Context,
    *,
    model_name: ModelName = None,
    system: Annotated[str | None, option("system", "what the model is told before the conversation")] = None,
    params: SamplingParams,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Talk to a model. Ctrl-C ends an answer, Ctrl-D the conversation."""
    from .chat import chat

    _refuse_config_flags(context, connect)
    config = _with_model(config, model_name)
    console = _console(log_level)
    raise typer.Exit(chat(config, params, system=system, run_dir=run_dir, connect=connect, console=console))


@app.command(epilog=EPILOG)
@with_flags
def info(
    context: typer.Context,
    *,
    model_name: ModelName = None,
    as_json: Annotated[bool, option("json", "one JSON object", "--json")] = False,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Show the card of a model, or card, limits and statistics of a pipeline that runs (--connect)."""
    from .info import info

    _refuse_config_flags(context, connect)
    config = _with_model(config, model_name)
    raise typer.Exit(info(config, run_dir=run_dir, connect=connect, as_json=as_json, console=_console(log_level)))


@app.command(epilog=EPILOG)
def restart(
    *,
    role: Annotated[str, typer.Argument(help="prepare, execute or summarize")],
    connect: Annotated[Path, option("connect", "the run directory of the pipeline")],
    model: Annotated[
        str | None, option("model", "execute only: other weights with the same tokenizer; by default the same")
    ] = None,
) -> None:
    """Replace a worker of a pipeline that runs. Its clients notice no more than a pause."""
    from .restart import restart

    raise typer.Exit(restart(role, connect=connect, model=model))


def _with_model(config: PipelineConfig, name: str | None) -> PipelineConfig:
    return config if name is None else replace(config, model=replace(config.model, model=name))


def _refuse_config_flags(context: typer.Context, connect: Path | None) -> None:
    if connect is not None and (flags := given_flags(context, PipelineConfig)):
        raise ConfigError(f"{', '.join(flags)}: with --connect the pipeline runs already", param="connect")


def _console(log_level: str) -> Console:
    """Standard error: what is not an answer."""
    from rich.console import Console

    console = Console(stderr=True)
    set_up_logging(log_level, console)
    return console
