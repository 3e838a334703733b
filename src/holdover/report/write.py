"""Put the page together and write it."""

from __future__ import annotations

from pathlib import Path

from ..compare import Results
from ..errors import HoldoverError
from .prediction import Prediction
from .view import view


def write_report(
    results: Results, folder: Path | str, name: Path | str = "report.html", prediction: Prediction | None = None
) -> Path:
    """Write the report into the folder that has the comparison's pictures, or to an absolute `name`; its path.

    With a `prediction` the predicted frontier of plans is drawn beside the measured one.
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
    text = pages.get_template("report.html").render(page=view(results, Path(folder), prediction))
    path = Path(folder) / name
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, "utf-8")
    beside.replace(path)
    return path
