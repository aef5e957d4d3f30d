"""Pictures of simulated pipelines: a self-contained SVG, schedules below each other on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from .schedule import OpKind
from .simulator import Simulation, Span, StageReport

WIDTH = 960
LEFT = 64
RIGHT = 16
ROW_HEIGHT = 18
ROW_GAP = 3
TITLE_HEIGHT = 24
PANEL_GAP = 12
MIN_LABEL_WIDTH = 13
"""Pixels an operation must be wide for its micro-batch number to be written on it."""

STYLE = """
text{font:11px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:12px}
.n{text-anchor:end}.m{text-anchor:middle;font-size:9px}
.idle{fill:#eaeef2}.forward{fill:#79b8ff}.backward{fill:#2f6fbb}.update{fill:#d9822b}
.w{fill:#ffffff}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.idle{fill:#21262d}.forward{fill:#388bfd}
.backward{fill:#1f4f8f}.update{fill:#d18616}}
""".strip()


def svg_schedules(results: Mapping[str, Simulation]) -> str:
    """One panel a schedule, one row a stage; forwards light, backwards dark, updates orange.

    Colours follow the reader's light or dark mode; nothing is loaded from outside.
    """
    longest = max((r.makespan_seconds for r in results.values()), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    top = 0.0
    for name, result in results.items():
        facts = f"time {result.makespan_seconds:.4g}, idle {result.bubble_fraction:.1%}"
        title = escape(f"{name}: {facts}")
        parts.append(f'<text class="t" x="{LEFT}" y="{top + 16:g}">{title}</text>')
        top += TITLE_HEIGHT
        for index, stage in enumerate(result.stages):
            parts += _row(index, stage, top=top, width=longest * scale, scale=scale)
            top += ROW_HEIGHT + ROW_GAP
        top += PANEL_GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _row(index: int, stage: StageReport, *, top: float, width: float, scale: float) -> list[str]:
    label = f'<text class="n" x="{LEFT - 6}" y="{top + 13:g}">stage {index}</text>'
    idle = _rectangle("idle", LEFT, top, width)
    return [label, idle, *(_operation(span, top=top, scale=scale) for span in stage.spans)]


def _operation(span: Span, *, top: float, scale: float) -> str:
    left, width = LEFT + span.start * scale, (span.end - span.start) * scale
    drawn = _rectangle(span.op.kind.value, left, top, width)
    if width < MIN_LABEL_WIDTH or span.op.kind is OpKind.UPDATE:
        return drawn
    style = "m w" if span.op.kind is OpKind.BACKWARD else "m"
    middle = left + width / 2
    number = span.op.micro_batch
    return f'{drawn}<text class="{style}" x="{middle:.2f}" y="{top + 12.5:g}">{number}</text>'


def _rectangle(style: str, left: float, top: float, width: float) -> str:
    return (
        f'<rect class="{style}" x="{left:.2f}" y="{top:g}" width="{width:.2f}" '
        f'height="{ROW_HEIGHT}"/>'
    )
