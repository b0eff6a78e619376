"""`pd-cluster`: the command line."""

from __future__ import annotations

import sys

import typer

from pd_cluster.cli import operating, serving, tools
from pd_cluster.cli.common import GroupedCommand, console, print_version
from pd_cluster.errors import ConfigError, ModelError, PdClusterError, StartError

__all__ = ["app", "main"]

app = typer.Typer(
    name="pd-cluster",
    help="Serve one language model with prefill and decode apart, and a radix KV cache on both.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    callback=print_version,
)
model_app = typer.Typer(
    help="Fetch and look at models.", no_args_is_help=True, rich_markup_mode=None
)
# In the order of --help.
for each in (
    serving.serve,
    operating.status,
    operating.scale,
    operating.drain,
    operating.explain,
    operating.down,
    tools.chat,
    tools.bench,
    tools.simulate,
):
    app.command(cls=GroupedCommand, short_help=each.__doc__)(each)
app.add_typer(model_app, name="model")
model_app.command("pull", cls=GroupedCommand)(tools.model_pull)
model_app.command("list", cls=GroupedCommand)(tools.model_list)


def main() -> None:
    """Errors that a user can mend are one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except (ConfigError, ModelError, StartError) as error:
        # Other libraries' messages, which ours may quote, can have several lines.
        line = " ".join(str(error).split())
        console.print(f"error: {line}", markup=False, soft_wrap=True)
        sys.exit(2)
    except PdClusterError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
