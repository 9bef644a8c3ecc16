"""``triptych keys``: who may come in over ``tcp://``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

keys = typer.Typer(
    name="keys",
    help="Keys for tcp:// endpoints: a folder for the server (--curve-keys), a file for each client.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(help="the folder that serve gets as --curve-keys")]
Name = Annotated[str, typer.Argument(help="name of the client")]


@keys.command()
def init(folder: Folder) -> None:
    """Make a folder with the server's key pair."""
    from ..protocol.keys import KeyFolder

    KeyFolder(folder).create()
    typer.echo(f"{folder}: created a server key; no clients yet")


@keys.command()
def add(
    folder: Folder,
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the client's file, by default NAME.json here")
    ] = None,
) -> None:
    """Allow a client to connect. Its keys, including the secret one, are only in the file that this writes."""
    from ..protocol.errors import ConfigError
    from ..protocol.keys import KeyFolder

    path = output or Path(f"{name}.json")
    if path.exists():
        raise ConfigError(f"{path} exists already", param="output")
    KeyFolder(folder).add(name).write(path)
    typer.echo(f"{path}: the keys of {name}; hand this file over in secret")


@keys.command("list")
def show(folder: Folder) -> None:
    """Show the clients that may connect, with their public keys."""
    from ..protocol.keys import KeyFolder

    folder_of_keys = KeyFolder(folder)
    typer.echo(f"server  {folder_of_keys.server.public}")
    for name, public in folder_of_keys.clients().items():
        typer.echo(f"{name}  {public}")


@keys.command()
def revoke(folder: Folder, name: Name) -> None:
    """Stop accepting a client."""
    from ..protocol.keys import KeyFolder

    KeyFolder(folder).revoke(name)
    typer.echo(f"{name} may no longer connect")
