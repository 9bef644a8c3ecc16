"""The command line. A verb's own module is imported when the verb runs, so that ``--help`` stays fast."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .. import __version__
from ..protocol.config import PipelineConfig
from ..protocol.sampling import SamplingParams
from .bench.options import BenchOptions
from .flags.aliases import canonical
from .flags.common import (
    Connect,
    LogLevel,
    Lora,
    ModelName,
    Output,
    PromptFile,
    Prompts,
    Resume,
    RunDir,
    refuse_config_flags,
    with_model,
)
from .flags.derived import OutputFormat, given_names, number, option, with_flags
from .flags.variables import PREFIX, warn_of_unknown
from .flags.verb import QuickGroup, Verb
from .gateway.config import GatewayConfig
from .replay.options import EngineConfig, StudyOptions
from .signals import INTERRUPTED, exit_on_signals
from .terminal.failures import reporting_failures
from .terminal.logs import set_up_logging, set_up_stream_logging
from .terminal.streams import keep_what_cannot_be_read, open_closed_streams, replace_what_cannot_be_written
from .verbs.keys import keys

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = (
    f"Every flag can also be set by an environment variable ({PREFIX}PAGE_SIZE=32 is --page-size 32)"
    " or a line of the --config file (page_size = 32)."
)

app = typer.Typer(
    name="triptych",
    cls=QuickGroup,
    help="An LLM inference server in three processes that loses no request when one of them crashes.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": canonical},
)
app.add_typer(keys)
verb = app.command(epilog=EPILOG, cls=Verb)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a verb and exit: 0 on success, 1 if something failed, 2 for an invalid setting."""
    open_closed_streams()
    replace_what_cannot_be_written()
    keep_what_cannot_be_read()
    exit_on_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent left it ignored, children would have no exit codes
    try:
        with reporting_failures():
            app(arguments)
    except (KeyboardInterrupt, RuntimeError) as error:
        # Ctrl-C while flags are created or a verb is imported; Python 3.11 wraps exceptions raised in class bodies.
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        sys.exit(INTERRUPTED)
    raise AssertionError("typer exits when a verb has ended")


@app.callback(invoke_without_command=True)
def triptych(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"triptych {__version__}")
        raise typer.Exit


@verb
@with_flags
def serve(
    *,
    model_name: ModelName = None,
    config: PipelineConfig,
    gateway: GatewayConfig,
    run_dir: RunDir = None,
    drain_timeout: Annotated[
        float, number("drain_timeout", "seconds for accepted requests to finish on a stop")
    ] = 20.0,
    log_level: LogLevel = "info",
) -> None:
    """Serve clients until Ctrl-C or SIGTERM: the first one drains, a second one stops at once."""
    from .verbs.serve import Task, serve

    console = _console(log_level, gateway.log_format)
    task = Task(
        config=with_model(config, model_name),
        gateway=gateway,
        run_dir=run_dir,
        drain_timeout=drain_timeout,
        log_level=log_level,
    )
    raise typer.Exit(serve(task, console=console))


@verb
@with_flags
def generate(
    context: typer.Context,
    *,
    prompts: Prompts = None,
    file: PromptFile = None,
    output: Output = None,
    output_format: Annotated[
        OutputFormat | None, option("format", "by default jsonl for --output *.jsonl, else text", "--format")
    ] = None,
    chat: Annotated[
        bool | None,
        option("chat", "apply the chat template or not; by default if the model has one", "--chat/--raw"),
    ] = None,
    stream: Annotated[
        bool | None,
        option("stream", "print text as it comes; by default for one prompt on a terminal", "--stream/--no-stream"),
    ] = None,
    resume: Resume = False,
    lora: Lora = "",
    params: SamplingParams,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Answer prompts. If one fails, the others go on; its row has the error, and the exit code is 1.

    A line that begins with {" is JSON: prompt, prompt_token_ids or messages, any other field of a
    request (docs/protocol.md), and an id.
    """
    from .terminal.output import choose_format
    from .verbs.generate import Task, generate

    refuse_config_flags(context, connect)
    task = Task(
        prompts=prompts or [],
        file=file,
        output=output,
        output_format=choose_format(output_format, output),
        chat=chat,
        stream=stream,
        resume=resume,
        lora=lora,
        params=params,
    )
    raise typer.Exit(generate(task, config, run_dir=run_dir, connect=connect, console=_console(log_level)))


@verb
@with_flags
def embed(
    context: typer.Context,
    *,
    prompts: Prompts = None,
    file: PromptFile = None,
    output: Output = None,
    prompt_name: Annotated[
        str | None, option("prompt_name", "the checkpoint's instruction before each text; empty: none", "--prompt-name")
    ] = None,
    dimensions: Annotated[
        int | None, option("dimensions", "only so many values, scaled like all of them; by default all", "--dimensions")
    ] = None,
    lora: Lora = "",
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Turn texts into vectors: a line of JSON for each. If one fails, the others go on, and the exit code is 1.

    A line that begins with {" is JSON: prompt or prompt_token_ids, any other field of an embedding's
    request (docs/protocol.md), and an id.
    """
    from .verbs.embed import Task, embed

    refuse_config_flags(context, connect)
    task = Task(
        prompts=prompts or [], file=file, output=output, prompt_name=prompt_name, dimensions=dimensions, lora=lora
    )
    raise typer.Exit(embed(task, config, run_dir=run_dir, connect=connect, console=_console(log_level)))


@verb
@with_flags
def run_batch(
    context: typer.Context,
    *,
    model_name: ModelName = None,
    file: Annotated[Path, option("file", "one request per line", "--file", "--input-file", "-f", "-i")],
    output: Annotated[
        Path, option("output", "overwritten if it exists; one line per request", "--output", "--output-file", "-o")
    ],
    resume: Resume = False,
    served_model_name: Annotated[
        list[str] | None, option("served_model_name", "the model's name in the requests; may be given several times")
    ] = None,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Answer the requests of a file in the format of OpenAI's Batch API, as serve --http would.

    If one fails, the others go on; its line has the error, and the exit code is 1.
    """
    from .gateway.serving.processes import check_installed

    refuse_config_flags(context, connect)
    check_installed()
    from .run_batch.verb import Task, run_batch

    config = with_model(config, model_name)
    gateway = GatewayConfig(served_model_name=tuple(served_model_name or ()))
    task = Task(file=file, output=output, resume=resume, gateway=gateway)
    raise typer.Exit(run_batch(task, config, run_dir=run_dir, connect=connect, console=_console(log_level)))


@verb
@with_flags
def chat(
    context: typer.Context,
    *,
    model_name: ModelName = None,
    system: Annotated[str | None, option("system", "the system message of the conversation")] = None,
    lora: Lora = "",
    params: SamplingParams,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Chat with a model. Ctrl-C ends an answer, Ctrl-D the conversation."""
    from .terminal.output import check_shown
    from .verbs.chat import chat

    refuse_config_flags(context, connect)
    check_shown(params, "n", "logprobs", "prompt_logprobs", how="a chat shows one answer, without logprobs")
    config, console = with_model(config, model_name), _console(log_level)
    options = {**params.to_wire(), "lora": lora}
    raise typer.Exit(chat(config, options, system=system, run_dir=run_dir, connect=connect, console=console))


@verb
@with_flags
def bench(
    context: typer.Context,
    *,
    model_name: ModelName = None,
    options: BenchOptions,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Measure a server (--url), a running pipeline (--connect), or one that is started for it.

    --itl-target-ms is the target for goodput; a pipeline that is started here also tries to meet it.
    """
    from .bench.verb import bench

    refuse_config_flags(context, connect or options.target.url, allowed=("--itl-target-ms",))
    config = with_model(config, model_name)
    raise typer.Exit(bench(options, config, run_dir=run_dir, connect=connect, console=_console(log_level)))


@verb
@with_flags
def top(
    *,
    folder: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="of the pipeline; by default the only one running")
    ] = None,
    connect: Annotated[Path | None, option("connect", "the same as RUN_DIR")] = None,
    once: Annotated[bool, option("once", "print one frame and exit, with 1 if a stage is not ready", "--once")] = False,
    interval: Annotated[float, number("interval", "seconds between two refreshes")] = 0.5,
) -> None:
    """Watch a pipeline: queues, requests, pages and step times.

    Keys: q quits, p pauses, s changes the order of the requests.
    """
    from .top.verb import top

    raise typer.Exit(top(folder or connect, once=once, interval_s=interval))


@verb
@with_flags
def info(
    context: typer.Context,
    *,
    model_name: ModelName = None,
    as_json: Annotated[bool, option("json", "print one JSON object", "--json")] = False,
    config: PipelineConfig,
    run_dir: RunDir = None,
    connect: Connect = None,
    log_level: LogLevel = "warning",
) -> None:
    """Show a model, its limits, the effective config, versions and the machine; with --connect also statistics."""
    from .verbs.info import info

    refuse_config_flags(context, connect)
    config = with_model(config, model_name)
    raise typer.Exit(info(config, run_dir=run_dir, connect=connect, as_json=as_json, console=_console(log_level)))


@verb
def restart(
    *,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prepare, execute or summarize")],
    connect: Annotated[Path, option("connect", "the run directory of the pipeline")],
    model: Annotated[
        str | None, option("model", "execute only: other weights with the same tokenizer; by default unchanged")
    ] = None,
) -> None:
    """Replace a worker of a running pipeline. Its clients only notice a pause."""
    from .verbs.restart import restart

    raise typer.Exit(restart(role, connect=connect, model=model))


@verb
def load_adapter(
    *,
    module: Annotated[str, typer.Argument(metavar="NAME=PATH", help="the LoRA adapter")],
    connect: Annotated[Path, option("connect", "the run directory of the pipeline")],
) -> None:
    """Serve one more LoRA adapter in a running pipeline. Its clients notice at most the pause of a restart."""
    from .verbs.adapters import load_adapter

    raise typer.Exit(load_adapter(module, connect=connect))


@verb
def unload_adapter(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="an adapter that was loaded while the pipeline ran")],
    connect: Annotated[Path, option("connect", "the run directory of the pipeline")],
) -> None:
    """Unload a LoRA adapter, once the requests for it are answered."""
    from .verbs.adapters import unload_adapter

    raise typer.Exit(unload_adapter(name, connect=connect))


@verb
@with_flags
def replay(
    context: typer.Context,
    *,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="a trace (serve --trace FILE), or arrivals as JSONL")
    ] = None,
    as_json: Annotated[bool, option("json", "print one JSON object", "--json")] = False,
    options: StudyOptions,
    config: EngineConfig,
    log_level: LogLevel = "warning",
) -> None:
    """Simulate the scheduler without a model, on recorded, listed or random requests.

    Flags that are not given are taken from the trace. --verify checks that the schedule is reproduced exactly.
    """
    from .replay.replay import replay, verify_file

    if options.verify:
        raise typer.Exit(verify_file(file, as_json=as_json))
    given, console = given_names(context, EngineConfig), _console(log_level)
    raise typer.Exit(replay(file, options, config, given=given, as_json=as_json, console=console))


def _console(log_level: str, log_format: str | None = None) -> Console:
    """``log_format``: of a server; None for other verbs."""
    from .terminal.error_console import ErrorConsole

    console = ErrorConsole()
    if log_format == "json":
        set_up_stream_logging(log_level, log_format, process="driver")
    else:
        set_up_logging(log_level, console, is_server=log_format is not None)
    warn_of_unknown(app)
    return console
