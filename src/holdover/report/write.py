"""Put the page together and write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..compare import Results
from ..errors import HoldoverError
from .view import view


def write_report(
    results: Results, folder: Path | str, name: str = "report.html", expected: Mapping[str, float] | None = None
) -> Path:
    """Write the report into the folder that has the comparison's pictures; its path.

    `expected` has the PSNR that was expected of a candidate, by label, to stand beside what was measured.
    """
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise HoldoverError(f"The report needs {error.name}: pip install 'holdover[report]'.") from None
    pages = Environment(
        loader=PackageLoader("holdover.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = pages.get_template("report.html").render(page=view(results, Path(folder), expected or {}))
    path = Path(folder) / name
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, "utf-8")
    beside.replace(path)
    return path
