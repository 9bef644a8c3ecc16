"""The reference half of docs/cli.md, generated from the flags; settings of a pipeline are in docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from ..cli import app
from .settings import groups

OWN = ""  # the panel of a verb's own flags


def commands() -> str:
    """Markdown: one section per verb with its own flags, then one for each group of flags but those of a pipeline."""
    verbs: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shared: dict[str, tuple[list[Any], list[str]]] = {}  # by panel: its flags, and the verbs that have them
    lines = ["## Reference", ""]
    for name, verb in _each(verbs):
        panels = _panels(verb)
        for panel, flags in panels.items():
            if panel != OWN and panel not in groups():
                shared.setdefault(panel, (flags, []))[1].append(name)
        lines += [f"### triptych {name}", "", *_about(name, verb, panels), "", *_table(panels.get(OWN, []))]
    for panel, (flags, names) in shared.items():
        lines += [f"### {panel}", "", f"Of {', '.join(f'`{name}`' for name in names)}.", "", *_table(flags)]
    return "\n".join(lines)


def _each(verbs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Verbs by name, each followed by its own subcommands."""
    for name, verb in verbs.items():
        yield name, verb
        yield from ((f"{name} {own}", part) for own, part in _each(getattr(verb, "commands", {})))


def _panels(verb: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for parameter in verb.params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            panels.setdefault(parameter.rich_help_panel or OWN, []).append(parameter)
    return panels


def _about(name: str, verb: Any, panels: dict[str, list[Any]]) -> Iterator[str]:
    arguments = [parameter for parameter in verb.params if parameter.param_type_name == "argument"]
    if not hasattr(verb, "commands"):
        flags = ["[flags]"] if panels else []
        yield f"`{' '.join(['triptych', name, *(_metavar(argument) for argument in arguments), *flags])}`"
        yield ""
    yield " ".join((verb.help or "").split())
    for argument in arguments:
        yield from ("", f"`{_metavar(argument)}`: {argument.help}.")
    if others := [panel for panel in panels if panel != OWN]:
        yield from ("", f"And the flags of {', '.join(map(_link, others))}.")


def _link(panel: str) -> str:
    return f"[{panel}]({'configuration.md' if panel in groups() else ''}#{panel.lower()})"


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def _table(flags: list[Any]) -> Iterator[str]:
    if not flags:
        return
    yield "| flag | default | |"
    yield "|---|---|---|"
    for flag in flags:
        names = ", ".join(f"`{name}`" for name in (*flag.opts, *flag.secondary_opts) if name.strip().startswith("-"))
        text = (flag.help or "").replace("|", "\\|")
        yield f"| {names} | {_default(flag)} | {text} |"
    yield ""


def _default(flag: Any) -> str:
    if flag.required:
        return "required"
    if flag.default in (None, [], ""):
        return ""
    if isinstance(flag.default, bool):
        return "on" if flag.default and not _turns_off(flag) else "off"
    return f"`{flag.default}`"


def _turns_off(flag: Any) -> bool:
    """Whether its only form is ``--no-...``."""
    return flag.default is True and not any(name.strip() for name in flag.opts)
