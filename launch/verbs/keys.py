"""``triptych keys``: manages access over ``tcp://``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..flags.narrow_help import NarrowHelp

keys = typer.Typer(
    name="keys",
    help="Keys for tcp:// endpoints: a folder for the server (--curve-keys), a file for each client.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="the folder passed to serve as --curve-keys")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="name of the client")]


@keys.command(cls=NarrowHelp)
def init(folder: Folder) -> None:
    """Create a folder with the server's key pair."""
    from ...protocol.keys import KeyFolder

    KeyFolder(folder).create()
    typer.echo(f"{folder}: a server key, no clients yet")


@keys.command(cls=NarrowHelp)
def add(
    folder: Folder,
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the client's file, by default NAME.json here")
    ] = None,
) -> None:
    """Admit a client. Its keys, including the secret one, are only in the file that this writes."""
    from ...protocol.errors import ConfigError
    from ...protocol.keys import KeyFolder

    path = output or Path(f"{name}.json")
    if path.exists():
        raise ConfigError(f"{path} exists already", param="output")
    of_server = KeyFolder(folder)
    made = of_server.add(name)
    try:
        made.write(path)
    except ConfigError:
        of_server.revoke(name)  # nobody has its secret
        raise
    typer.echo(f"{path}: the keys of {name}; pass it on securely")


@keys.command("list", cls=NarrowHelp)
def show(folder: Folder) -> None:
    """Show the admitted clients with their public keys."""
    from ...protocol.keys import KeyFolder

    folder_of_keys = KeyFolder(folder)
    typer.echo(f"server  {folder_of_keys.server.public}")
    for name, public in folder_of_keys.clients().items():
        typer.echo(f"{name}  {public}")


@keys.command(cls=NarrowHelp)
def revoke(folder: Folder, name: Name) -> None:
    """Stop admitting a client."""
    from ...protocol.keys import KeyFolder

    KeyFolder(folder).revoke(name)
    typer.echo(f"{name} is no longer admitted")
