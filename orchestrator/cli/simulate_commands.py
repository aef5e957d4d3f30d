"""`simulate NAME`: a command for each simulator plugin, with options made from its `Config`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, RunErrorCode
from .output import DebugFlag, JsonFlag, PluginsDirOption, print_json, print_table

OutputOption = Annotated[Path | None, typer.Option("--output", help="SVG file to draw into.")]
_SHARED = {"output": OutputOption, "json": JsonFlag, "debug": DebugFlag}


def register(app: typer.Typer) -> None:
    """Add the verb of this module."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=settings, add_help_option=False)(simulate)


def simulate(context: typer.Context, plugins_dir: PluginsDirOption = None) -> None:
    """Predict what something would cost without running it; `simulate --help` lists what."""
    from ..plugin_manager import create_plugins

    simulators = create_plugins(plugins_dir=plugins_dir).components["simulator"]
    command = typer.main.get_command(simulators_app(simulators))
    words = context.args or ["--help"]
    status = command.main(words, prog_name="deltaloom simulate", standalone_mode=False)
    if isinstance(status, int) and status:
        raise typer.Exit(status)


def simulators_app(simulators: Mapping[str, type[Any]]) -> typer.Typer:
    """A command for each simulator, with an option for each field of its `Config`."""
    app = typer.Typer(
        help="Predict what something would cost, without running it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(lambda: None)
    for name in sorted(simulators):
        app.command(name)(_command(simulators[name]))
    return app


def option_help(config_type: type[Any]) -> dict[str, str]:
    """The docstring under each field of a configuration class; empty where there is none."""
    docs: dict[str, str] = {}
    for owner in reversed(config_type.__mro__):
        if dataclasses.is_dataclass(owner):
            docs |= _field_docs(owner)
    return docs


def _command(simulator: type[Any]) -> Callable[..., None]:
    def command(output: Path | None, json: bool, debug: bool, **given: str | None) -> None:
        _run(simulator, given, output=output, json=json)

    docs = option_help(simulator.Config)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    f"--{field.name.replace('_', '-')}",
                    help=_help_text(field, docs.get(field.name, "")),
                    metavar="VALUE",
                    show_default=False,
                ),
            ],
        )
        for field in dataclasses.fields(simulator.Config)
    ]
    for name, annotation in _SHARED.items():
        default = None if name == "output" else False
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = inspect.getdoc(simulator)
    command.__annotations__ = {}
    return command


def _run(
    simulator: type[Any], given: Mapping[str, str | None], *, output: Path | None, json: bool
) -> None:
    from ..config import build_config

    path = f"simulate.{simulator.name}"
    hints = typing.get_type_hints(simulator.Config)
    values = {
        name: _value(text, hints[name], path=f"{path}.{name}")
        for name, text in given.items()
        if text is not None
    }
    report = simulator(build_config(simulator.Config, values, path=path)).simulate()
    if output is not None:
        if not report.svg:
            raise ConfigError(
                f"simulator {simulator.name!r} drew no picture for --output {str(output)!r}.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Leave --output out.",
            )
        output.write_text(report.svg, encoding="utf-8")
    if json:
        print_json(report.values)
        return
    for table in report.tables:
        print_table(table.columns, table.rows, title=table.title)
    for note in report.notes:
        typer.echo(note)


def _value(text: str, hint: Any, *, path: str) -> Any:
    """An option's text as TOML; lists may leave their brackets out, `1,2,2`."""
    from ..config import parse_override

    takes_list = typing.get_origin(hint) is tuple
    wrapped = f"[{text}]" if takes_list and not text.lstrip().startswith("[") else text
    value = parse_override(f"value={wrapped}")["value"]
    if takes_list and isinstance(value, str):
        value = [part.strip() for part in text.split(",")]
    if hint is str and not isinstance(value, str):
        value = text
    if isinstance(value, dict):
        raise ConfigError(f"{path}: must not be a table.", code=RunErrorCode.WRONG_TYPE)
    return value


def _help_text(field: dataclasses.Field[Any], doc: str) -> str:
    if field.default is dataclasses.MISSING:
        return doc
    shown = field.default
    if isinstance(shown, tuple):
        shown = ",".join(map(str, shown)) or "none"
    return f"{doc} [default: {shown if shown != '' else 'none'}]".strip()


def _field_docs(owner: type[Any]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):
        return {}
    (body,) = [item.body for item in tree.body if isinstance(item, ast.ClassDef)]
    docs: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs
