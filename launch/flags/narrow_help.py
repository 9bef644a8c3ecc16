"""``--help`` on a terminal that is too narrow for a table of flags."""

from __future__ import annotations

import shutil
from typing import Any

import typer

TABLE_COLUMNS = 100  # below this the table truncates names, which then can be neither typed nor searched for


class NarrowHelp(typer.core.TyperCommand):
    """A command whose help is a plain list of flags on such a terminal, under the same headings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        table: Any = super()
        plain: Any = super(typer.core.TyperCommand, self)
        is_wide = shutil.get_terminal_size().columns >= TABLE_COLUMNS
        (table if is_wide else plain).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record := parameter.get_help_record(ctx):
                names, text = record
                panel = panels.setdefault(parameter.rich_help_panel or kind, [])
                panel.append((names.removeprefix(" / "), text))  # precedes a flag that has only a --no- form
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
