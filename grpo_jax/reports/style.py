"""The style sheet of report.html: light and dark, from the reader's system."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f9f9f7; --surface: #ffffff; --ink: #14140f; --soft: #52514e; --faint: #8a8983;
  --line: #e4e3de; --grid: #ecebe6; --track: #efeee9;
  --series-1: #2a78d6; --series-2: #eb6834; --series-3: #1baf7a; --series-4: #eda100; --series-5: #e87ba4;
  --series-6: #4a3aa7; --better: #00800e; --worse: #c33232; --before: #b3b1a9; --oracle: #cfe0f5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f0f0e; --surface: #1a1a19; --ink: #f7f7f5; --soft: #c3c2b7; --faint: #8f8e86;
    --line: #2f2f2c; --grid: #282826; --track: #262624;
    --series-1: #3987e5; --series-2: #d95926; --series-3: #199e70; --series-4: #c98500; --series-5: #d55181;
    --series-6: #9085e9; --better: #3fc65a; --worse: #f07070; --before: #6d6b64; --oracle: #26456b;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 80px; }
header { margin-bottom: 28px; }
.over { margin: 0; color: var(--faint); font-size: 13px; letter-spacing: .04em; }
h1 { margin: 2px 0 10px; font-size: 30px; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 20px; letter-spacing: -.01em; }
h3 { margin: 0 0 10px; font-size: 14px; font-weight: 600; }
section { margin-top: 44px; }
.claim { margin: 0; font-size: 19px; line-height: 1.45; color: var(--soft); max-width: 46em; }
.claim::first-letter { text-transform: uppercase; }
.claim strong { color: var(--ink); }
.note { margin: 0 0 14px; color: var(--faint); font-size: 13.5px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 14px; margin-top: 0; }
.card, .chart, .entry { background: var(--surface); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px; margin: 0; }
.card h3 { display: flex; justify-content: space-between; gap: 8px; }
.card h3::first-letter { text-transform: uppercase; }
.card em { font-style: normal; font-weight: 500; color: var(--soft); font-variant-numeric: tabular-nums; }
.bar { display: grid; grid-template-columns: 48px 1fr 52px; align-items: center; gap: 8px; font-size: 13px;
  color: var(--soft); margin-top: 5px; }
.bar b { text-align: right; font-weight: 500; font-variant-numeric: tabular-nums; }
.bar.after, .bar.after b { color: var(--ink); font-weight: 650; }
.track { position: relative; height: 9px; border-radius: 4px; background: var(--track); overflow: hidden; }
.track div { position: absolute; top: 0; bottom: 0; border-radius: 4px; background: var(--before); }
.after .track div { background: var(--series-1); }
.oracle .track div { background: var(--oracle); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(318px, 1fr)); gap: 14px; }
.entry { display: flex; flex-direction: column; }
.pair { display: flex; align-items: center; justify-content: space-between; margin-bottom: 12px; }
.pair img { border-radius: 6px; display: block; }
.pair img.crisp { image-rendering: pixelated; }
.pair .arrow { color: var(--faint); font-size: 18px; }
.missing { width: 128px; height: 128px; border-radius: 6px; border: 1px dashed var(--line); color: var(--faint);
  display: grid; place-items: center; font-size: 13px; }
.prompt { margin: 0; color: var(--faint); font-size: 14px; overflow-wrap: anywhere; }
.rewrite { margin: 2px 0 10px; font-weight: 550; font-size: 14.5px; overflow-wrap: anywhere; }
.episodes { display: grid; grid-template-columns: repeat(auto-fill, minmax(318px, 1fr)); gap: 14px; }
.episode img { border-radius: 6px; display: block; margin-bottom: 6px; }
.episode img.crisp { image-rendering: pixelated; }
.turn { border-left: 3px solid var(--track); padding-left: 10px; margin: 10px 0; }
.turn h3 { margin: 0; font-size: 12.5px; color: var(--faint); font-weight: 500; }
.turn .note { margin: 0; }
.scores { margin-top: auto; width: 100%; border-collapse: collapse; font-size: 13px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.scores td { padding: 2px 0; }
.scores td:nth-child(n+2) { text-align: right; width: 4em; }
.scores td:nth-child(3) { width: 1.6em; text-align: center; color: var(--faint); }
.scores .better { color: var(--better); font-weight: 600; }
.scores .worse { color: var(--worse); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 14px; }
.chart figcaption { font-weight: 600; font-size: 14px; }
.chart .note { margin: 0; font-size: 12.5px; }
.chart svg { display: block; width: 100%; height: auto; margin-top: 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-top: 4px; font-size: 12.5px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); stroke-width: 1; }
.grid.zero { stroke: var(--faint); stroke-width: 1; opacity: .6; }
.tick { fill: var(--faint); font-size: 11px; font-variant-numeric: tabular-nums; }
.raw { fill: none; stroke-width: 1; opacity: .28; }
.smooth { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.scroll { overflow: auto; max-height: 460px; border: 1px solid var(--line); border-radius: 10px;
  background: var(--surface); }
.data { border-collapse: collapse; width: 100%; font-size: 13.5px; }
.data th { position: sticky; top: 0; background: var(--surface); text-align: left; font-weight: 600;
  color: var(--soft); padding: 9px 12px; border-bottom: 1px solid var(--line); white-space: nowrap; }
.data td { padding: 6px 12px; border-bottom: 1px solid var(--grid); vertical-align: top; }
.data tr:last-child td { border-bottom: 0; }
.data .number { text-align: right; font-variant-numeric: tabular-nums; }
.data th:has(~ th) { text-align: left; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 24px; margin-top: 14px; }
dl { display: grid; grid-template-columns: minmax(0, max-content) minmax(5em, 1fr); gap: 3px 14px; margin: 0;
  font-size: 13.5px; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
details { margin-top: 22px; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
pre { background: var(--surface); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  overflow: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media print { .scroll { max-height: none; } .card, .chart, .entry { break-inside: avoid; } }
"""
