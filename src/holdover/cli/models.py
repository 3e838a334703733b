"""`holdover models`: is my model covered?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

console = Console()


def models(
    name: Annotated[str | None, typer.Argument(help="One transformer class; all of them without it.")] = None,
) -> None:
    """The transformer classes that were tried: their streams, segments, signals and shipped constants."""
    from ..errors import HoldoverError
    from ..support import support_of, supported

    if name is not None:
        try:
            console.print(support_of(name).explain(), highlight=False, soft_wrap=True)
        except HoldoverError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from None
        return
    rows = supported()
    headers = ("streams", "segments", "TeaCache signal", "coefficients", "MagCache ratios", "cache-dit", "diffusers")
    table = Table(Column("class", overflow="fold", min_width=20), *headers)
    for row in rows:
        table.add_row(
            row.name,
            str(len(row.streams)),
            str(row.segments),
            ", ".join(row.signals),
            _count(row.coefficients),
            _count(row.ratios),
            "yes" if row.cache_dit else "refused",
            row.verified,
        )
    console.print(table)
    replay, cached = sum(bool(row.verified) for row in rows), sum(bool(row.cache_dit) for row in rows)
    console.print(f"{replay} of {len(rows)} classes replay exactly; {cached} run under cache-dit.", highlight=False)


def _count(names: tuple[str, ...]) -> str:
    return str(len(names)) if names else "measure"
