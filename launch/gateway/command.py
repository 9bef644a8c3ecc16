"""The gateway's own command line, for a pipeline that is already running."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ...protocol.errors import TriptychError
from ..flags.derived import option, with_flags
from ..flags.verb import Verb
from ..signals import exit_on_signals
from .config import MAX_WORKERS, GatewayConfig
from .serving.address import listening, url_of
from .serving.processes import check_installed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DEFAULT_ADDRESS = "127.0.0.1:8000"


@app.command(cls=Verb)
@with_flags
def gateway(
    *,
    run_dir: Annotated[Path, option("run_dir", "run directory of the pipeline, as printed by `triptych serve`")],
    config: GatewayConfig,
    log_level: Annotated[str, option("log_level", "debug, info, warning or error")] = "info",
) -> None:
    """Serve OpenAI's API for a running pipeline, in one process, until Ctrl-C or SIGTERM."""
    from ..cli import app as whole
    from ..flags.variables import warn_of_unknown
    from ..terminal.logs import set_up_stream_logging

    check_installed()
    config.check_lora_root()
    set_up_stream_logging(log_level, config.log_format, process="gateway")
    warn_of_unknown(whole)  # an environment shared with `serve` is fine
    from .serving.server import logger, make_gateway, serve

    config = replace(config, http=config.http or DEFAULT_ADDRESS)
    exit_on_signals()  # uvicorn re-raises the signal that stopped it; the socket's file must still be removed
    with listening(config.http or DEFAULT_ADDRESS) as listener:
        made = make_gateway(config, run_dir, index=MAX_WORKERS + os.getpid())  # above the indices of `serve`
        logger.info("%s serves the pipeline in %s", url_of(listener, is_tls=config.is_tls), run_dir)
        serve(made, listener)


def main() -> NoReturn:
    try:
        app()
    except TriptychError as error:
        typer.secho(f"error: {error.message}", fg="red", err=True)
        sys.exit(2)
    raise AssertionError("typer exits when a verb has ended")
