"""The page itself: template, style, script and data in one file that opens from disk."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import differences
from ..errors import PluginError, RunErrorCode
from ..review.wording import agreement_rows
from .charts import chart_lines, chart_shapes, charts_for
from .lineage import draw_lineage

if TYPE_CHECKING:
    from .collect import RunReport

TEMPLATES = Path(__file__).parent / "templates"
Json = dict[str, Any]


def render(reports: Sequence[RunReport]) -> str:
    """One run, or two beside each other, as HTML.

    Raises `PluginError` naming the extra `report` when a library it needs is not installed.
    """
    jinja2 = _need("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html", "j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"amount": amount, "size": size, "share": share, "seconds": seconds}
    page = environment.get_template("report.html.j2").render(
        runs=[_run_context(report) for report in reports],
        reviewed=any(report.reviews for report in reports),
        comparison=_comparison(reports) if len(reports) > 1 else None,
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "report.js").read_text(encoding="utf-8"),
        data=packed(_data(reports)),
        library=_plotting_library(),
    )
    return str(page)


def _data(reports: Sequence[RunReport]) -> Json:
    charts = charts_for([report.figures for report in reports])
    runs = [{**r.data, "lines": chart_lines(r.figures, charts)} for r in reports]
    return {"charts": chart_shapes(charts), "runs": runs}


def packed(value: Any) -> str:
    """A JSON value, compressed, as text that HTML holds unescaped. The same value, same text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _packed_text(text)


def amount(value: float | None) -> str:
    """A number to read: four digits, thousands apart."""
    if value is None:
        return "-"
    if isinstance(value, int) or (abs(value) >= 1000 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:.4g}"


def size(num_bytes: float) -> str:
    """A size with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def share(value: float) -> str:
    """A share in per cent."""
    return f"{value:.2%}" if value < 0.1 else f"{value:.0%}"


def seconds(value: float) -> str:
    """A duration in the unit that fits."""
    if value < 120:
        return f"{value:.3g} s"
    minutes = value / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _packed_text(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _plotting_library() -> str:
    offline = _need("plotly.offline")
    return _packed_text(offline.get_plotlyjs())


def _need(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise PluginError(
            f"the report needs the library {module.partition('.')[0]!r}, which cannot be "
            f"imported: {error}.",
            code=RunErrorCode.BROKEN_PLUGIN,
            remedy="Install it with: pip install 'deltaloom[report]'",
        ) from error


def _run_context(report: RunReport) -> Json:
    figures = report.figures
    published, dense = figures.published
    lineage = list(report.branches)
    return {
        "name": report.name,
        "branch": report.branch,
        "location": report.location,
        "versions": [figures.versions[0], figures.versions[-1]],
        "duration": figures.seconds[-1],
        "reward": figures.first_and_last("reward"),
        "tokens": _total(figures.metrics.get("num_tokens", ())),
        "last": figures.last,
        "published": published,
        "dense": dense,
        "accounting": figures.accounting,
        "digests": report.digests,
        "config_digest": report.config_digest,
        "options": flat_options(report.config),
        "environment": flat_options(report.environment),
        "branches": lineage,
        "lineage": draw_lineage(lineage),
        "timeline": report.timeline,
        "reviews": report.reviews,
        "agreement": agreement_rows(report.reviews) if report.reviews else [],
        "quality": report.quality,
    }


def flat_options(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Options as (dotted name, JSON value), in their order."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            rows += flat_options(value, name)
        else:
            rows.append((name, json.dumps(value, ensure_ascii=False)))
    return rows


def _comparison(reports: Sequence[RunReport]) -> Json:
    """What differs between two runs: options, and the first version with other weights."""
    first, second = reports[0], reports[1]
    common = sorted(first.state_digests.keys() & second.state_digests.keys())
    apart = [v for v in common if first.state_digests[v] != second.state_digests[v]]
    return {
        "options": differences(first.config, second.config),
        "common": len(common),
        "apart": apart[0] if apart else None,
    }


def _total(values: Sequence[float | None]) -> float:
    return sum(value for value in values if value is not None)
