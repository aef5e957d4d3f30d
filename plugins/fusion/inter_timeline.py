"""Where the time of a step goes on each generation instance, run serially and fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .inter_stage import (
    FusedOutcome,
    InstanceLengths,
    InterStageCosts,
    decode_seconds,
    serial_seconds,
)

ROW_HEIGHT = 16
ROW_GAP = 3
LEFT = 88
RIGHT = 70
TITLE_HEIGHT = 22
PANEL_GAP = 26
TOP = 54

STYLE = """
text{font:11px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:12px}
.n{text-anchor:end}.idle{fill:#eaeef2}.generate{fill:#79b8ff}.infer{fill:#d9822b}
.axis{stroke:#8c959f;stroke-width:1}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.idle{fill:#21262d}.generate{fill:#388bfd}
.infer{fill:#d18616}.axis{stroke:#6e7681}}
""".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one instance does from `start` to `end`: `generate` or `infer`."""

    instance: int
    kind: str
    start: float
    end: float


def serial_spans(lengths: InstanceLengths, costs: InterStageCosts) -> list[Span]:
    """Every instance generates its own rollouts; all infer when the last one has ended."""
    generated = [max(decode_seconds(own, costs), default=0.0) for own in lengths]
    total, last = serial_seconds(lengths, costs), max(generated)
    return _kept_positive(
        [
            *(Span(instance=i, kind="generate", start=0.0, end=t) for i, t in enumerate(generated)),
            *(Span(instance=i, kind="infer", start=last, end=total) for i in range(len(lengths))),
        ]
    )


def fused_spans(
    lengths: InstanceLengths, costs: InterStageCosts, outcome: FusedOutcome
) -> list[Span]:
    """The spans of `outcome`; a migration pause counts as generation of those that stay."""
    if not outcome.tail_ends:
        return serial_spans(lengths, costs)
    spans = []
    for index, own in enumerate(lengths):
        alone = max(decode_seconds(own, costs), default=0.0)
        stays = index in outcome.kept
        end = outcome.generation_seconds if stays else min(alone, outcome.trigger_seconds)
        spans.append(Span(instance=index, kind="generate", start=0.0, end=end))
    freed = [index for index in range(len(lengths)) if index not in outcome.kept]
    for start, end in _freed_inference(lengths, costs, outcome, num_freed=len(freed)):
        spans += [Span(instance=i, kind="infer", start=start, end=end) for i in freed]
    left = (outcome.generation_seconds, outcome.total_seconds)
    spans += [
        Span(instance=i, kind="infer", start=left[0], end=left[1]) for i in range(len(lengths))
    ]
    return _kept_positive(spans)


def spans_svg(panels: Sequence[tuple[str, Sequence[Span]]], *, width: int = 960) -> str:
    """An SVG document: titled panels on one time axis, a row an instance.

    Colours follow the reader's light or dark mode; nothing is loaded from outside.
    """
    longest = max(span.end for _, spans in panels for span in spans)
    scale = (width - LEFT - RIGHT) / longest
    body, top = list(_legend()), TOP
    for title, spans in panels:
        body += _panel(title, spans, top, scale)
        top += TITLE_HEIGHT + _num_rows(spans) * (ROW_HEIGHT + ROW_GAP) + PANEL_GAP
    label = escape("; ".join(title for title, _ in panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}" role="img" aria-label="{label}">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _freed_inference(
    lengths: InstanceLengths, costs: InterStageCosts, outcome: FusedOutcome, *, num_freed: int
) -> list[tuple[float, float]]:
    """When the freed instances are busy before the tail has ended: work is divided evenly."""
    finished = sum(map(len, lengths)) - len(outcome.tail_ends)
    now, work = outcome.trigger_seconds, finished * costs.inference_seconds
    busy = []
    for end in outcome.tail_ends:
        done = min(end, now + work / num_freed)
        busy.append((now, done))
        work = max(0.0, work - num_freed * (end - now)) + costs.inference_seconds
        now = end
    return busy


def _kept_positive(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.end > span.start]


def _num_rows(spans: Sequence[Span]) -> int:
    return 1 + max(span.instance for span in spans)


def _legend() -> list[str]:
    lines = []
    for index, (kind, name) in enumerate((("generate", "generation"), ("infer", "inference"))):
        x = LEFT + index * 110
        lines.append(f'<rect class="{kind}" x="{x}" y="10" width="12" height="12" rx="2"/>')
        lines.append(f'<text x="{x + 17}" y="20">{name}</text>')
    return lines


def _panel(title: str, spans: Sequence[Span], top: int, scale: float) -> list[str]:
    lines = [f'<text class="t" x="{LEFT}" y="{top}">{escape(title)}</text>']
    end = LEFT + max(span.end for span in spans) * scale
    for row in range(_num_rows(spans)):
        y = _row_top(top, row)
        lines.append(f'<text class="n" x="{LEFT - 8}" y="{y + 12}">instance {row}</text>')
        lines.append(
            f'<rect class="idle" x="{LEFT}" y="{y}" width="{end - LEFT:.2f}" '
            f'height="{ROW_HEIGHT}"/>'
        )
    for span in spans:
        x, width = LEFT + span.start * scale, (span.end - span.start) * scale
        hint = f"{span.kind} {span.start:.4g} to {span.end:.4g}"
        lines.append(
            f'<rect class="{span.kind}" x="{x:.2f}" y="{_row_top(top, span.instance)}" '
            f'width="{width:.2f}" height="{ROW_HEIGHT}"><title>{hint}</title></rect>'
        )
    return lines


def _row_top(top: int, row: int) -> int:
    return top + 8 + row * (ROW_HEIGHT + ROW_GAP)
