"""The graph as text, mermaid or SVG, without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from .dsl import NodeSpec
from .graph import Edge, Graph

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 150, 54, 70, 34, 24


def draw_text(graph: Graph, *, lag: int) -> str:
    """One line a node in order, with what it reads and makes, and the loop at the end."""
    width = max(len(node.name) for node in graph.nodes)
    lines = []
    for node in graph.nodes:
        reads = ", ".join((*node.inputs, *_carried_ports(graph, node)))
        arrow = f"{reads} -> {node.output}" if reads else f"-> {node.output}"
        parts = " ".join(f"{slot}={choice.name}" for slot, choice in node.components.items())
        lines.append(f"{node.name:<{width}}  [{node.role}]  {arrow}  {parts}".rstrip())
    lines += [
        f"{edge.port}: {edge.producer} => {edge.consumer} ({_when(graph, edge, lag=lag)})"
        for edge in graph.edges
        if edge.carried
    ]
    return "\n".join(lines)


def _when(graph: Graph, edge: Edge, *, lag: int) -> str:
    """Which versions a loop-carried edge brings."""
    return "when due" if graph.node(edge.consumer).role == "evaluate" else f"lag {lag}"


def draw_mermaid(graph: Graph, *, lag: int) -> str:
    """A mermaid flowchart; the loop-carried edge is dotted and says its lag."""
    ids = {node.name: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for node in graph.nodes:
        label = f"{node.name}<br/><small>{_caption(node)}</small>".replace('"', "#quot;")
        lines.append(f'    {ids[node.name]}["{label}"]')
    for edge in graph.edges:
        when = f"-. {edge.port}, {_when(graph, edge, lag=lag)} .->"
        arrow = when if edge.carried else f"-- {edge.port} -->"
        lines.append(f"    {ids[edge.producer]} {arrow} {ids[edge.consumer]}")
    return "\n".join(lines)


def draw_svg(graph: Graph, *, lag: int) -> str:
    """A self-contained SVG: nodes in columns by depth, readable in light and dark."""
    places = layout(graph)
    columns = 1 + max(x for x, _ in places.values())
    rows = 1 + max(y for _, y in places.values())
    width = 2 * MARGIN + columns * BOX_WIDTH + (columns - 1) * GAP_X
    height = 2 * MARGIN + rows * BOX_HEIGHT + (rows - 1) * GAP_Y + 50
    body = [
        _svg_edge(edge, places, when=_when(graph, edge, lag=lag), bottom=height - MARGIN)
        for edge in graph.edges
    ]
    body += [_svg_node(node, places[node.name]) for node in graph.nodes]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="task graph">\n'
        "<style>text{font:13px system-ui,sans-serif;fill:#1b1f24;text-anchor:middle}"
        ".s{font-size:11px;fill:#57606a}rect{fill:#f6f8fa;stroke:#57606a;rx:8}"
        "path{fill:none;stroke:#57606a;stroke-width:1.5;marker-end:url(#a)}"
        ".c{stroke-dasharray:5 4}@media(prefers-color-scheme:dark){text{fill:#e6edf3}"
        ".s{fill:#9da7b3}rect{fill:#21262d;stroke:#9da7b3}path{stroke:#9da7b3}}</style>\n"
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8" style="marker-end:none"/>'
        "</marker></defs>\n" + "\n".join(body) + "\n</svg>\n"
    )


def layout(graph: Graph) -> Mapping[str, tuple[int, int]]:
    """Column (longest path from a source) and row of each node."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        sources = graph.producers(node.name)
        depth[node.name] = 1 + max((depth[name] for name in sources), default=-1)
    used: dict[int, int] = {}
    places = {}
    for node in graph.nodes:
        column = depth[node.name]
        places[node.name] = (column, used.get(column, 0))
        used[column] = used.get(column, 0) + 1
    return places


def _svg_node(node: NodeSpec, place: tuple[int, int]) -> str:
    x, y = _corner(place)
    middle = x + BOX_WIDTH // 2
    return (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>'
        f'<text x="{middle}" y="{y + 23}">{escape(node.name)}</text>'
        f'<text class="s" x="{middle}" y="{y + 41}">{escape(_caption(node))}</text>'
    )


def _svg_edge(edge: Edge, places: Mapping[str, tuple[int, int]], *, when: str, bottom: int) -> str:
    x1, y1 = _corner(places[edge.producer])
    x2, y2 = _corner(places[edge.consumer])
    if edge.carried:
        start, end = x1 + BOX_WIDTH // 2, x2 + BOX_WIDTH // 2
        path = f"M{start} {y1 + BOX_HEIGHT}V{bottom - 12}H{end}V{y2 + BOX_HEIGHT + 2}"
        label, lx, ly = f"{edge.port}, {when}", (start + end) // 2, bottom - 18
    else:
        y1, y2 = y1 + BOX_HEIGHT // 2, y2 + BOX_HEIGHT // 2
        path = f"M{x1 + BOX_WIDTH} {y1}L{x2 - 2} {y2}"
        label, lx, ly = edge.port, (x1 + BOX_WIDTH + x2) // 2, (y1 + y2) // 2 - 7
    kind = ' class="c"' if edge.carried else ""
    return f'<path{kind} d="{path}"/><text class="s" x="{lx}" y="{ly}">{escape(label)}</text>'


def _corner(place: tuple[int, int]) -> tuple[int, int]:
    column, row = place
    return MARGIN + column * (BOX_WIDTH + GAP_X), MARGIN + row * (BOX_HEIGHT + GAP_Y)


def _caption(node: NodeSpec) -> str:
    chosen = [choice.name for choice in node.components.values() if choice.name != "function"]
    names = [getattr(f, "__name__", "function") for f in node.functions]
    return ", ".join((*chosen, *names)) or node.role.value


def _carried_ports(graph: Graph, node: NodeSpec) -> tuple[str, ...]:
    return tuple(e.port for e in graph.edges if e.carried and e.consumer == node.name)
