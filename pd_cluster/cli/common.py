"""What the commands share: the shape of their help, the terminal, and some options."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from pd_cluster import __version__


class GroupedCommand(TyperCommand):
    """Help in which no name is cut, however narrow the terminal: long ones have their text below.

    Options stand under their `rich_help_panel`.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Options" if param.param_type_name == "option" else "Arguments"
                group = getattr(param, "rich_help_panel", None) or default
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


# Errors, progress and what a person reads; stdout is for programs.
console = Console(stderr=True, highlight=False)

ClusterName = Annotated[str, typer.Option(help="Which of this user's clusters.")]
AdminKey = Annotated[str | None, typer.Option(envvar="PD_ADMIN_KEY", help="If the server has one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server says.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pd-cluster {__version__}")
        raise typer.Exit


def print_version(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
