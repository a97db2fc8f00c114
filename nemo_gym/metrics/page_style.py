"""The style sheet of the profile page: light or dark as the reader's system is, readable on paper and on a phone."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --line: #e4e3df; --grid: #ecebe7;
  --text: #1d1d1b; --soft: #6a6963;
  --mark: #2f6fb2; --low: #b9b6ad; --high: #3d9a6b; --bad: #c2543d; --box: #bcd3ea; --rule: #8f8c84;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #161718; --card: #1f2122; --line: #323537; --grid: #2b2e30;
    --text: #ecebe7; --soft: #a3a19a;
    --mark: #6aa5e3; --low: #6d6c68; --high: #5fbf8e; --bad: #e07c64; --box: #33506d; --rule: #8d8b86;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 32px 24px 56px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1180px; margin: 0 auto; }
h1 { font-size: 24px; font-weight: 650; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 620; margin: 0 0 2px; }
p { margin: 0; color: var(--soft); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 24px; font-weight: 620; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.cards { display: grid; gap: 12px; margin: 12px 0; }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.card { padding: 16px 18px 14px; min-width: 0; }
.card svg { display: block; width: 100%; max-width: 640px; height: auto; margin: 10px auto 0; }
.wide { margin: 12px 0; overflow-x: auto; }
.band { display: flex; height: 18px; border-radius: 5px; overflow: hidden; margin: 12px 0 8px; gap: 2px; }
.band i { display: block; min-width: 2px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.never { background: var(--low); } .sometimes { background: var(--mark); } .always { background: var(--high); }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 14px; }
th { text-align: right; font-weight: 500; color: var(--soft); padding: 6px 12px; border-bottom: 1px solid var(--line); }
td { text-align: right; padding: 7px 12px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
td { font-variant-numeric: tabular-nums; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; overflow-wrap: anywhere; }
th:first-child { min-width: 130px; }
th:last-child, td:last-child { padding-right: 0; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
svg text.axis { fill: var(--soft); } svg text.middle { text-anchor: middle; } svg text.end { text-anchor: end; }
.mark { fill: var(--mark); } .mark.low { fill: var(--low); } .mark.high { fill: var(--high); }
.mark.bad { fill: var(--bad); }
.grid { stroke: var(--grid); } .rule { stroke: var(--rule); stroke-dasharray: 3 3; }
.whisker { stroke: var(--rule); } .box { fill: var(--box); } .median { stroke: var(--mark); stroke-width: 2.5; }
.mark:hover, g:hover .box { opacity: 0.75; }
@media print { body { padding: 0; } .card, .tile { break-inside: avoid; } }
"""
