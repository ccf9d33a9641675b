"""The report of a measurement as a file: a page that needs nothing else, or the picture alone."""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from scripts.serving_bench.chart import chart
from scripts.serving_bench.table import table

_DPI: Final = 110
_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Benchmark of $model</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }
  pre { overflow-x: auto; background: #f4f4f4; padding: 1rem; line-height: 1.3 }
  svg { max-width: 100%; height: auto }
</style>
<h1>Benchmark of $model</h1>
<p>$when; load average of the client's machine $load;
$cpu of one core went to the client itself.</p>
$picture
<h2>Figures</h2>
<pre>$table</pre>
<h2>Command</h2>
<pre>$command</pre>
</html>
""")


def write_report(document: Mapping[str, Any], path: Path, command: str) -> None:
    """Write the report of what `figures` returned; the name's end says which kind.

    Args:
        document: The figures.
        path: Ends in `.html` or `.png`.
        command: The command line that made them.

    Raises:
        OSError: It cannot be written.
    """
    if path.suffix == ".png":
        chart(document).savefig(path, dpi=_DPI)
        return
    environment = document["environment"]
    path.write_text(
        _PAGE.substitute(
            model=escape(document["model"]),
            when=escape(environment["started_at"]),
            load=" and ".join(f"{value:.2f}" for value in environment["load_average"]),
            cpu=f"{environment['client_cpu_share']:.0%}",
            picture=_svg(document),
            table=escape(table(document)),
            command=escape(command),
        ),
        encoding="utf-8",
    )


def _svg(document: Mapping[str, Any]) -> str:
    """The picture as an element of the page, without the head of an XML file."""
    drawn = io.StringIO()
    chart(document).savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
