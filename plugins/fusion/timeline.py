"""Pictures of schedules: a self-contained SVG for browsers and READMEs, and text for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .problem import FusionProblem, TaskKind
from .schedule import Evaluation, FusedSchedule, TaskTimes, evaluate

ROW_HEIGHT = 18
ROW_GAP = 3
LEFT = 64
RIGHT = 16
HEADER = 44
PANEL_GAP = 34
TITLE_HEIGHT = 20
MIN_LABEL_WIDTH = 13
"""Pixels a task must be wide for its micro-batch number to be written on it."""

TEXT_SYMBOLS = "aAbB."
"""Forward and backward of A, forward and backward of B, idle."""

STYLE = """
text{font:11px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:12px}
.n{text-anchor:end}.m{text-anchor:middle;font-size:9px}.l{text-anchor:middle}
.idle{fill:#eaeef2}.k0{fill:#79b8ff}.k1{fill:#2f6fbb}.k2{fill:#ffc680}.k3{fill:#d9822b}
.w{fill:#ffffff}.axis{stroke:#8c959f;stroke-width:1}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.idle{fill:#21262d}.k0{fill:#388bfd}
.k1{fill:#1f4f8f}.k2{fill:#d18616}.k3{fill:#8a5208}.axis{stroke:#6e7681}}
""".strip()

LEGEND = ("A forward", "A backward", "B forward", "B backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One titled schedule of a picture."""

    title: str
    evaluation: Evaluation


def panel(problem: FusionProblem, schedule: FusedSchedule, *, title: str) -> Panel:
    """Evaluate a schedule for drawing; the title gets its makespan, bubbles and peak memory."""
    evaluation = evaluate(problem, schedule)
    facts = (
        f"makespan {evaluation.makespan}, idle {evaluation.bubble_fraction:.0%}, "
        f"peak memory {evaluation.peak_memory:.4g}"
    )
    return Panel(title=f"{title}: {facts}", evaluation=evaluation)


def svg_timeline(panels: Sequence[Panel], *, width: int = 960) -> str:
    """An SVG document of the panels below each other on one time axis, for example before/after.

    Colours follow the reader's light or dark mode; nothing is loaded from outside. `width` is in
    pixels.
    """
    longest = max(one.evaluation.makespan for one in panels)
    scale = (width - LEFT - RIGHT) / longest
    body: list[str] = list(_legend())
    top = HEADER
    for one in panels:
        body.extend(_panel_svg(one, top, scale))
        top += _panel_height(one) + PANEL_GAP
    label = escape("; ".join(one.title for one in panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}" role="img" aria-label="{label}">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def text_timeline(evaluation: Evaluation, *, width: int = 100) -> str:
    """One line a node, one character a time unit, coarser when the makespan exceeds `width`.

    `a`/`A` are forward and backward of model A, `b`/`B` of model B, `.` is idle; a coarse cell
    shows the task that runs in its middle.
    """
    num_columns = min(width, evaluation.makespan)
    step = evaluation.makespan / num_columns
    num_nodes = len(evaluation.node_peaks)
    rows = [["."] * num_columns for _ in range(num_nodes)]
    for task in evaluation.tasks:
        for column in range(int(task.start / step), min(num_columns, int(task.end / step) + 1)):
            if task.start <= (column + 0.5) * step < task.end:
                rows[task.node][column] = TEXT_SYMBOLS[task.kind]
    digits = len(str(num_nodes - 1))
    lines = [f"{node:>{digits}} |{''.join(row)}|" for node, row in enumerate(rows)]
    return "\n".join(lines) + "\n"


def _panel_height(one: Panel) -> int:
    return TITLE_HEIGHT + len(one.evaluation.node_peaks) * (ROW_HEIGHT + ROW_GAP)


def _legend() -> list[str]:
    items = []
    for kind, name in enumerate(LEGEND):
        x = LEFT + kind * 110
        items.append(f'<rect class="k{kind}" x="{x}" y="10" width="12" height="12" rx="2"/>')
        items.append(f'<text x="{x + 17}" y="20">{name}</text>')
    return items


def _panel_svg(one: Panel, top: int, scale: float) -> list[str]:
    lines = [f'<text class="t" x="{LEFT}" y="{top}">{escape(one.title)}</text>']
    end = LEFT + one.evaluation.makespan * scale
    for node in range(len(one.evaluation.node_peaks)):
        y = _row_top(top, node)
        lines.append(f'<text class="n" x="{LEFT - 8}" y="{y + 13}">node {node}</text>')
        lines.append(
            f'<rect class="idle" x="{LEFT}" y="{y}" width="{end - LEFT:.2f}" '
            f'height="{ROW_HEIGHT}"/>'
        )
    for task in one.evaluation.tasks:
        lines.extend(_task_svg(task, _row_top(top, task.node), scale))
    lines.extend(_end_mark(one, top, end))
    return lines


def _row_top(top: int, node: int) -> int:
    return top + TITLE_HEIGHT - 10 + node * (ROW_HEIGHT + ROW_GAP)


def _task_svg(task: TaskTimes, y: int, scale: float) -> list[str]:
    x, width = LEFT + task.start * scale, (task.end - task.start) * scale
    model = "AB"[task.kind.model]
    direction = "backward" if task.kind.is_backward else "forward"
    hint = f"{model}{task.micro_batch} {direction}, {task.start} to {task.end}"
    lines = [
        f'<rect class="k{int(task.kind)}" x="{x:.2f}" y="{y}" width="{max(width - 0.5, 0.3):.2f}" '
        f'height="{ROW_HEIGHT}"><title>{hint}</title></rect>'
    ]
    if width >= MIN_LABEL_WIDTH:
        white = " w" if task.kind in (TaskKind.A_BACKWARD, TaskKind.B_BACKWARD) else ""
        lines.append(
            f'<text class="m{white}" x="{x + width / 2:.2f}" y="{y + 12}">{task.micro_batch}</text>'
        )
    return lines


def _end_mark(one: Panel, top: int, end: float) -> list[str]:
    bottom = _row_top(top, len(one.evaluation.node_peaks))
    return [
        f'<line class="axis" x1="{end:.2f}" y1="{_row_top(top, 0)}" x2="{end:.2f}" y2="{bottom}"/>',
        f'<text class="l" x="{end - 10:.2f}" y="{bottom + 12}">{one.evaluation.makespan}</text>',
    ]
