"""``--config FILE``: values for flags from a TOML file, below the command line and the environment in precedence."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...protocol.errors import ConfigError
from ...protocol.spelling import did_you_mean
from ..terminal.not_utf8 import why_file_not_utf8
from .aliases import ALIASES

if TYPE_CHECKING:
    from typer._click.core import Context, Parameter

NOT_IN_A_FILE = frozenset({"config_file", "help", "version", "install_completion", "show_completion"})


def take_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of this call's flags. For an eager option: before any other is processed.

    A file may serve several verbs: keys known only to others are skipped, and a table named after a verb applies to
    that verb only.

    Raises:
        ConfigError: the file cannot be read, or a key is not a flag of any verb.
    """
    if path is not None:
        verbs = _flags_of_verbs(context)
        own = context.command.name or ""
        context.default_map = _defaults(_read(path), verbs, own, path)
    return path


def _flags_of_verbs(context: Context) -> dict[str, dict[str, Parameter]]:
    """By verb: every name that a key may have, and its parameter."""
    parent = context.parent.command if context.parent else None
    commands = getattr(parent, "commands", {context.command.name or "": context.command})
    return {name: dict(_keys(command)) for name, command in commands.items()}


def _keys(command: Any) -> Iterator[tuple[str, Parameter]]:
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in NOT_IN_A_FILE:
            yield parameter.name, parameter
            flags = {flag.removeprefix("--") for flag in parameter.opts if flag.startswith("--")}
            aliases = {alias for alias, flag in ALIASES.items() if flag in flags}
            yield from ((_name(flag), parameter) for flag in flags | aliases)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is {why_file_not_utf8(content)}", param="config") from error
    return _parse(path, text)


def _parse(path: Path, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", param="config") from error


def _defaults(
    table: Mapping[str, Any], verbs: Mapping[str, Mapping[str, Parameter]], own: str, path: Path
) -> dict[str, Any]:
    known = {key for flags in verbs.values() for key in flags}
    defaults: dict[str, Any] = {}
    own_table: Mapping[str, Any] = {}
    for key, value in table.items():
        if key in verbs and isinstance(value, Mapping):
            _check_keys(value, verbs[key].keys(), path, where=f" of [{key}]")
            own_table = value if key == own else own_table
        else:
            _check_keys([key], known | verbs.keys(), path)
    flags = verbs.get(own, {})
    for part in ({k: v for k, v in table.items() if k not in verbs}, own_table):
        defaults |= _translate(part, flags, path)
    return defaults


def _check_keys(keys: Any, known: Any, path: Path, *, where: str = "") -> None:
    for key in keys:
        if _name(key) not in known:
            raise ConfigError(f"{path}: {key!r}{where} is not a flag{did_you_mean(_name(key), known)}", param=key)


def _translate(table: Mapping[str, Any], flags: Mapping[str, Parameter], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if (parameter := flags.get(_name(key))) is not None:
            name = parameter.name or ""
            if name in found:
                raise ConfigError(f"{path}: {name} is given twice", param=name)
            takes_several = bool(getattr(parameter, "multiple", False))
            if isinstance(value, (list, Mapping)) != takes_several:
                form = "a list" if takes_several else "a single value"
                raise ConfigError(f"{path}: {name} is {value!r:.80}, it must be {form}", param=name)
            found[name] = _as_typed(value)
    return found


def _as_typed(value: Any) -> Any:
    """A value as it would be typed after its flag, so that it is validated as strictly: 32.5 is no number of pages."""
    if isinstance(value, list):
        return [_as_typed(part) for part in value]
    if isinstance(value, Mapping):
        return [f"{key}={part}" for key, part in value.items()]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(flag: str) -> str:
    return flag.replace("-", "_")
