"""A plan as one self-contained HTML page: the tables, and pictures, in light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from distjax._src.plan.report import (
    CAUSES,
    Record,
    Report,
    answer,
    error_tables,
    memory_table,
    name_of,
    plan_tables,
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
  max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.35rem }
p.answer { border-left: 4px solid var(--activations); padding-left: .8rem }
p.no { border-color: var(--gradients) } p.dim, figcaption, caption { color: var(--dim) }
div.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
caption { text-align: left; padding: .3rem 0 } th { text-align: left }
td, th { padding: .15rem .7rem .15rem 0; border-bottom: 1px solid var(--line); white-space: nowrap }
figure { margin: .5rem 0 } svg { width: 100%; height: 9rem; display: block }
div.row { display: flex; align-items: center; font-size: .85rem; margin: .25rem 0 }
div.row span { width: 9rem; flex: none; overflow: hidden; text-overflow: ellipsis }
div.row span + div + span { width: 5.5rem; text-align: right; color: var(--dim) }
@media (max-width: 30rem) { div.row span { width: 6rem } }
div.bar { display: flex; flex: auto; height: 1rem; position: relative }
div.bar b { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px dashed var(--ink) }
p.key span { white-space: nowrap; margin-right: .8em }
p.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
"""


def as_page(report: Report) -> str:
    """Returns the report as the text of an HTML page that needs no other file."""
    title = html.escape(f"{report.target}: a plan")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p class='dim'>{html.escape(report.head)}; bytes are those of one chip</p>"
        f"{''.join(_sections(report))}</body></html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    for plans in report.by_topology():
        kind = "answer" if any(p.fits for p in plans) else "answer no"
        yield f"<p class='{kind}'>{html.escape(answer(plans))}</p>"
        yield _bars(None, plans)
        yield _wide([memory_table(plans), *error_tables(plans)])
    if len({p.chips for p in report.plans}) > 1:
        ordered = sorted(report.plans, key=lambda p: (name_of(p), p.chips))
        yield _bars("memory of a chip, by strategy over numbers of chips", ordered, with_chips=True)
    planned = [p for p in report.plans if p.memory]
    for plan in planned:
        is_open = " open" if plan is planned[0] else ""
        head = html.escape(f"{name_of(plan)} on {plan.topology}")
        yield f"<details{is_open}><summary><b>{head}</b></summary>{_curve(plan)}"
        yield f"{_wide(plan_tables(plan, 40))}</details>"


def _wide(tables: Sequence[Table]) -> str:
    return f"<div class='wide'>{as_html([t for t in tables if t.rows])}</div>"


def _bars(caption: str | None, plans: Sequence[Record], with_chips: bool = False) -> str:
    """A bar for each plan, of its memory by cause, and a line at what there is."""
    done = [p for p in plans if p.memory]
    most = max([1, *(p.memory.peak_bytes for p in done)])
    limits = [p.memory.limit_bytes or 0 for p in done]
    whole = max([most, *(limit for limit in limits if limit < 4 * most)])
    rows: list[str] = []
    for plan, limit in zip(done, limits, strict=True):
        name = f"{name_of(plan)}, {plan.chips}" if with_chips else name_of(plan)
        parts = [
            f"<i title='{cause}: {format_bytes(size)}' "
            f"style='width:{100 * max(size, 0) / whole:.2f}%;background:var(--{cause})'></i>"
            for cause, size in plan.memory.by_cause.items()
        ]
        if 0 < limit <= whole:
            title = f"{format_bytes(limit)} a chip"
            parts.append(f"<b title='{title}' style='left:{100 * limit / whole:.2f}%'></b>")
        rows.append(
            f"<div class='row'><span>{html.escape(name)}</span><div class='bar'>{''.join(parts)}"
            f"</div><span>{format_bytes(plan.memory.peak_bytes)}</span></div>"
        )
    color = "<span><i style='background:var(--{0})'></i>{0}</span> "
    key = "".join(map(color.format, CAUSES))
    dashed = "dashed: what a chip has" if any(0 < limit <= whole for limit in limits) else None
    texts = "; ".join(text for text in (caption, dashed) if text)
    below = f"<p class='key'>{key}</p><figcaption>{texts}</figcaption>"
    return f"<figure>{''.join(rows)}{below}</figure>"


def _curve(plan: Record) -> str:
    """The bytes alive over the schedule, and a tick for each collective."""
    values, ticks = plan.schedule["live_bytes"], plan.schedule["collectives"]
    most, step = max(1, *values, 1), 640 / max(1, len(values))
    points = " ".join(f"{i * step:.1f},{110 - 105 * v / most:.1f}" for i, v in enumerate(values))
    parts = [f"<polygon points='0,110 {points} 640,110' fill='var(--activations)'/>"]
    for place, kind, size in ticks:
        color = "gradients" if kind in ("all-reduce", "reduce-scatter") else "parameters"
        parts.append(
            f"<rect x='{place * 640:.1f}' y='114' width='3' height='14' fill='var(--{color})'>"
            f"<title>{kind}, {format_bytes(size)}</title></rect>"
        )
    label = f"temporaries alive along the schedule, {format_bytes(max([0, *values]))} at most; "
    label += "below, the collectives"
    return (
        f"<figure><svg viewBox='0 0 640 130' preserveAspectRatio='none' role='img' aria-label="
        f"'{label}'>{''.join(parts)}</svg><figcaption>{label}</figcaption></figure>"
    )
