"""The style sheet of the HTML report: light, dark and print. Colours do not rely on red and green."""

from __future__ import annotations

PAGE = """\
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6876; --line: #d9dee5; --page: #f5f6f8;
  --card: #ffffff; --accent: #0b6bcb; --pale: #cfe3f8; --reference: #7a8694; --pass: #1a7f4b;
  --fail: #c0362c; --unsure: #9a6700; --f0: #a9cdf2; --f1: #f3c98b; --f2: #c3b5ec; --f3: #a5ddc4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #98a3b1; --line: #323a45;
  --page: #14181d; --card: #1c2229; --accent: #5aa9f5; --pale: #1f4468; --reference: #8b97a5;
  --pass: #4cc38a; --fail: #ff8279; --unsure: #e0b03d;
  --f0: #1f4d7c; --f1: #7a4f12; --f2: #4d3f85; --f3: #1d5b43; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 0 0 8px; }
h3 small { font-weight: normal; color: var(--soft); font-size: 12.5px; }
a { color: inherit; text-decoration-color: var(--line); text-underline-offset: 3px; }
.lead { color: var(--soft); margin: 4px 0 20px; }
.note { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 22px 24px;
  margin: 0 0 20px; }
.scroll { overflow-x: auto; }
.head { display: flex; gap: 24px; justify-content: space-between; align-items: flex-start; }
.head p { margin: 2px 0 0; color: var(--soft); }
.gain { font-size: 30px; font-weight: 650; line-height: 1.1; text-align: right; white-space: nowrap;
  color: var(--accent); letter-spacing: -0.02em; }
.gain.alone { color: var(--soft); font-size: 20px; }
.warning { border-left: 3px solid var(--unsure); padding: 2px 12px; margin: 14px 0 0; overflow-wrap: anywhere; }
.charts, .tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr));
  gap: 20px 36px; margin-top: 22px; }
.tables { align-items: start; } .wide { grid-column: 1 / -1; }
figure, section { margin: 0; min-width: 0; }
figcaption { font-size: 12.5px; color: var(--soft); margin-top: 4px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; white-space: nowrap; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
td { overflow-wrap: anywhere; min-width: 10ch; }
.summary td { overflow-wrap: normal; white-space: nowrap; }
.summary td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 14ch; }
.summary td:last-child { white-space: normal; min-width: 14ch; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; overflow-wrap: normal; min-width: 0; }
.checks { margin-top: 18px; }
.checks td:first-child { width: 1%; white-space: nowrap; min-width: 0; }
.failures { border-color: var(--fail); } .failures h2 { color: var(--fail); } .failures .checks { margin-top: 8px; }
.drawn { margin-top: 22px; } .graph { overflow: auto; max-height: 640px; border: 1px solid var(--line); }
.graph svg { width: auto; max-width: none; margin: 0 auto; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0 0 8px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border: 1px solid var(--line); }
i.f0 { background: var(--f0); } i.f1 { background: var(--f1); } i.f2 { background: var(--f2); }
i.f3 { background: var(--f3); } i.float { background: var(--page); }
.advice { color: var(--soft); }
.badge { display: inline-block; padding: 0 8px; border-radius: 9px; font-size: 12px; font-weight: 600;
  line-height: 19px; border: 1px solid currentColor; }
.pass { color: var(--pass); } .FAIL { color: var(--fail); }
.WARN, .inconclusive { color: var(--unsure); }
details { margin-top: 18px; } summary { cursor: pointer; font-size: 14px; font-weight: 600; }
details[open] > summary { margin-bottom: 8px; }
dl { display: grid; grid-template-columns: fit-content(45%) minmax(0, 1fr); gap: 3px 18px; margin: 0;
  font-size: 13.5px; }
dt { color: var(--soft); overflow-wrap: anywhere; } dd { margin: 0; overflow-wrap: anywhere; }
svg { display: block; width: 100%; max-width: 640px; height: auto; }
svg text { font-size: 12px; fill: var(--ink); } svg .tick { fill: var(--soft); font-size: 11px; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; } svg .value { font-weight: 600; }
svg .grid { stroke: var(--line); } svg .grid.one { stroke: var(--reference); stroke-dasharray: 4 3; }
svg .bar { fill: var(--accent); opacity: 0.16; } svg .bar.solid { opacity: 0.6; }
svg .other .bar { fill: var(--reference); }
svg .box { fill: var(--pale); stroke: var(--accent); } svg .median { stroke: var(--accent); stroke-width: 2.5; }
svg .dots { fill: var(--accent); opacity: 0.4; }
svg .other .box { fill: none; stroke: var(--reference); } svg .other .median { stroke: var(--reference); }
svg .other .dots { fill: var(--reference); }
svg .best { fill: none; stroke: var(--accent); stroke-width: 2; opacity: 0.55; }
svg .mark { stroke: var(--card); stroke-width: 1; fill: var(--accent); }
svg .mark.front { fill: var(--pale); stroke: var(--accent); stroke-width: 2; }
svg .whisker { stroke: var(--accent); stroke-width: 2; opacity: 0.6; }
svg .other .mark { fill: var(--reference); } svg .other .whisker { stroke: var(--reference); }
svg .mark.dropped { fill: var(--card); stroke: var(--reference); stroke-width: 1.5; }
svg .node { fill: var(--page); stroke: var(--line); } svg .edge { fill: none; stroke: var(--reference); opacity: 0.7; }
svg .f0 { fill: var(--f0); } svg .f1 { fill: var(--f1); } svg .f2 { fill: var(--f2); } svg .f3 { fill: var(--f3); }
svg .node ~ .tick { fill: var(--ink); }
svg .spent { fill: var(--accent); opacity: 0.7; } svg .op { font-size: 12px; font-weight: 600; }
svg .mark.failed { fill: none; stroke: var(--fail); stroke-width: 2; }
@media (max-width: 640px) { main { padding: 20px 10px 40px; } .card { padding: 16px 14px; }
  .head { flex-direction: column; gap: 6px; } .gain { text-align: left; }
  th, th.number { white-space: normal; } th, td { padding-right: 8px; } td { min-width: 0; overflow-wrap: break-word; }
  figure > svg text, figure > svg .tick { font-size: 13px; }
  .stack thead { display: none; } .stack, .stack tbody, .stack tr, .stack td { display: block; }
  .stack tr { border-bottom: 1px solid var(--line); padding: 4px 0; }
  .stack td { display: grid; grid-template-columns: 14ch 1fr; gap: 0 10px; border: 0; padding: 2px 0;
    text-align: left; white-space: normal; }
  .stack td::before { content: attr(data-head); color: var(--soft); font-size: 12.5px; }
  .stack td:empty { display: none; } }
@media print { :root { color-scheme: light; --page: #fff; --ink: #000; } main { padding: 0; max-width: none; }
  .card { border: 0; border-top: 1px solid #999; border-radius: 0; padding: 14px 0; }
  .charts, .tables { grid-template-columns: 1fr 1fr; } figure, section, .checks, tr { break-inside: avoid; }
  .graph { max-height: none; overflow: visible; } .graph svg { width: 100%; height: auto; } }
"""
