"""A plan as one self-contained HTML page: the tables, and pictures as SVG, in light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from distjax._src.plan.report import (
    CAUSES,
    Plan,
    Report,
    answer,
    cause_of,
    error_tables,
    memory_rows,
)
from distjax._src.tables import Table, as_html, format_bytes

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6570; --paper: #fff; --line: #d5dae0;
  --parameters: #3467c4; --optimizer: #7b9fe0; --state: #8a6fc4; --batch: #c7a02f;
  --gradients: #cc5a4b; --activations: #3d9a72; --code: #7d8790; --unattributed: #c3c9d0 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --dim: #9aa5b1; --paper: #14171a;
  --line: #353b42; --parameters: #6c96e8; --optimizer: #41639f; --state: #a98fe0; --batch: #d9b957;
  --gradients: #e07d6f; --activations: #58b98f; --code: #8d97a1; --unattributed: #4b535c } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.35rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p.answer { font-size: 1.05rem; border-left: 4px solid var(--activations); padding-left: .8rem }
p.no { border-color: var(--gradients) } p.dim, figcaption, caption { color: var(--dim) }
div.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
caption { text-align: left; padding: .3rem 0 } th { text-align: left }
td, th { padding: .15rem .7rem .15rem 0; border-bottom: 1px solid var(--line); white-space: nowrap }
figure { margin: .5rem 0 } svg { width: 100%; height: auto; display: block }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif } svg .dim { fill: var(--dim) }
ul.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem }
ul.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
"""
_WIDTH = 640


def as_page(report: Report) -> str:
    """Returns the report as the text of an HTML page that needs no other file."""
    title = html.escape(f"{report.target}: a plan")
    with_libtpu = f", libtpu {report.libtpu}" if report.libtpu else ""
    body = "".join(_sections(report))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p class='dim'>compiled by JAX {html.escape(report.jax)}{html.escape(with_libtpu)}; "
        f"bytes are those of one chip</p>{body}</body></html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    keys = dict.fromkeys((p.topology, p.slices) for p in report.plans)
    for key in keys:
        plans = [p for p in report.plans if (p.topology, p.slices) == key]
        kind = "answer" if any(p.fits for p in plans) else "answer no"
        yield f"<p class='{kind}'>{html.escape(answer(plans))}</p>"
        yield _figure("memory of a chip by cause", _bars(plans), _key())
        yield _wide([Table("", *memory_rows(plans)), *error_tables(plans)])
    if len({p.chips for p in report.plans}) > 1:
        yield "<h2>Over numbers of chips</h2>"
        yield _figure("peak memory of a chip, by strategy", _scaling(report.plans))
    shown = report.shown
    for plan in report.plans:
        if plan.memory is not None or plan.error:
            yield from _details(plan, is_open=plan is shown)


def _details(plan: Plan, is_open: bool) -> Iterator[str]:
    head = f"{plan.name} on {plan.topology}"
    yield f"<details{' open' if is_open else ''}><summary><b>{html.escape(head)}</b></summary>"
    if plan.error:
        yield f"<pre>{html.escape(plan.error)}</pre>"
    for note in plan.notes:
        yield f"<p>{html.escape(note)}</p>"
    if plan.schedule.get("live_bytes"):
        yield _figure("temporaries alive along the schedule; below, the collectives", _curve(plan))
    yield _wide(list(_tables(plan)))
    yield "</details>"


def _tables(plan: Plan) -> Iterator[Table]:
    times = {k: v for k, v in plan.seconds_at_least.items() if v is not None}
    facts = [(f"seconds at least: {k}", f"{v:.3g}") for k, v in times.items()]
    if plan.flops_per_chip is not None:
        facts.append(("flops of a chip", f"{plan.flops_per_chip:.4g}"))
    yield Table("costs of a step", (), tuple(facts))
    if plan.memory is not None:
        rows = [
            (v.name, v.cause, f"{v.dtype}{list(v.shape)}", format_bytes(v.bytes_per_chip))
            + (v.split or "whole", "donated" if v.donated else "")
            for v in plan.memory.by_variable[:40]
        ]
        header = "name", "cause", "shape", "bytes", "split", ""
        yield Table("largest arrays", header, tuple(rows))
    for title, which in (("as written", plan.written), ("compiled", plan.compiled)):
        rows = [
            (str(c.count), c.kind, c.axis, format_bytes(c.bytes))
            + ("yes" if c.overlaps else "no", cause_of(c))
            for c in which
        ]
        header = "", "kind", "over", "bytes", "overlaps", "cause"
        yield Table(f"collectives {title}", header, tuple(rows))
    whole = tuple((w.name, format_bytes(w.bytes), w.why) for w in plan.not_split[:40])
    yield Table("whole on each chip, over 64 KiB", ("name", "bytes", "why"), whole)


def _wide(tables: Sequence[Table]) -> str:
    return f"<div class='wide'>{as_html([t for t in tables if t.rows])}</div>"


def _figure(caption: str, svg: str, key: str = "") -> str:
    return f"<figure>{svg}{key}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _key() -> str:
    items = "".join(f"<li><i style='background:var(--{c})'></i>{c}</li>" for c in CAUSES)
    return f"<ul class='key'>{items}</ul>"


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height:.0f}' role='img' aria-label='{html.escape(label)}'>"
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{html.escape(text)}</text>"


def _bars(plans: Sequence[Plan]) -> str:
    """A bar for each strategy, of its memory by cause, and a line at what there is."""
    done = [p for p in plans if p.memory is not None]
    peaks = [p.memory.peak_bytes for p in done if p.memory]
    limit = next((p.memory.limit_bytes for p in done if p.memory and p.memory.limit_bytes), None)
    most = max([1, *peaks])
    is_near = limit is not None and limit < 4 * most
    scale = (_WIDTH - 200) / max(most, limit if limit is not None and is_near else 0)
    parts = []
    for row, plan in enumerate(done):
        assert plan.memory is not None
        x, y = 110.0, 22.0 * row + 6
        parts.append(_text(0, y + 12, plan.name[:18]))
        for cause in CAUSES:
            width = plan.memory.by_cause[cause] * scale
            tip = f"{cause}: {format_bytes(plan.memory.by_cause[cause])}"
            if width > 0:
                parts.append(
                    f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='16' "
                    f"fill='var(--{cause})'><title>{tip}</title></rect>"
                )
                x += width
        parts.append(_text(x + 6, y + 12, format_bytes(plan.memory.peak_bytes), "class='dim'"))
    height = 22.0 * len(done) + 26
    if limit is not None and is_near:
        at = 110 + limit * scale
        parts.append(
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='0' y2='{height - 18}' stroke='var(--gradients)'"
            " stroke-dasharray='4 3'/>"
        )
        end = "text-anchor='middle' class='dim'"
        parts.append(_text(min(at, _WIDTH - 60), height - 4, f"{format_bytes(limit)} a chip", end))
    return _svg(height, parts, "memory by cause and strategy")


def _curve(plan: Plan) -> str:
    """The bytes alive over the schedule, and a tick for each collective."""
    values = plan.schedule["live_bytes"]
    most, step = max(1, *values), _WIDTH / max(1, len(values))
    points = [f"{i * step:.1f},{110 - 95 * v / most:.1f}" for i, v in enumerate(values)]
    area = f"0,110 {' '.join(points)} {_WIDTH},110"
    parts = [f"<polygon points='{area}' fill='var(--activations)' opacity='.75'/>"]
    parts.append(_text(2, 12, f"{format_bytes(max(values))} at most"))
    for place, kind, size in plan.schedule["collectives"]:
        color = "gradients" if kind in ("all-reduce", "reduce-scatter") else "parameters"
        parts.append(
            f"<rect x='{place * _WIDTH:.1f}' y='114' width='3' height='14' fill='var(--{color})'>"
            f"<title>{kind}, {format_bytes(size)}</title></rect>"
        )
    parts.append(_text(2, 144, "begin", "class='dim'"))
    parts.append(_text(_WIDTH - 2, 144, "end", "class='dim' text-anchor='end'"))
    return _svg(150, parts, "memory and collectives along the schedule")


def _scaling(plans: Sequence[Plan]) -> str:
    """The peak of each strategy over the numbers of chips."""
    done = [p for p in plans if p.memory is not None]
    chips = sorted({p.chips for p in done})
    most = max([1, *(p.memory.peak_bytes for p in done if p.memory)])
    place = {n: 60 + i * (_WIDTH - 220) / max(1, len(chips) - 1) for i, n in enumerate(chips)}
    parts = [_text(place[n], 176, f"{n} chips", "text-anchor='middle' class='dim'") for n in chips]
    colors = [c for c in CAUSES if c not in ("code", "unattributed")]
    for i, name in enumerate(dict.fromkeys(p.name for p in done)):
        own = sorted((p for p in done if p.name == name), key=lambda p: p.chips)
        at = [(place[p.chips], 155 - 140 * p.memory.peak_bytes / most) for p in own if p.memory]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        color = f"var(--{colors[i % len(colors)]})"
        parts.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{color}'/>" for x, y in at]
        parts.append(
            f"<rect x='{_WIDTH - 140}' y='{8 + 18 * i}' width='10' height='10' fill='{color}'/>"
        )
        parts.append(_text(_WIDTH - 124, 17 + 18 * i, name))
    parts.append(_text(0, 20, format_bytes(most), "class='dim'"))
    return _svg(max(184, 18 * len(colors)), parts, "peak memory over numbers of chips")
