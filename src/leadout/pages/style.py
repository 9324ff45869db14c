"""The look of a page that loads nothing: readable in light and dark, on paper and on a phone."""

STYLE = """
:root { color-scheme: light dark;
  --back: light-dark(#ffffff, #14171c); --ink: light-dark(#1c2330, #e4e8ee);
  --soft: light-dark(#5b6675, #9aa5b4); --rule: light-dark(#dfe4ea, #2c333d);
  --card: light-dark(#f6f8fa, #1c2128);
  --fit: light-dark(#15803d, #4ade80); --doubtful: light-dark(#a16207, #facc15);
  --unfit: light-dark(#b91c1c, #f87171); --note: light-dark(#5b6675, #9aa5b4); }
body { background: var(--back); color: var(--ink); margin: 0 auto; padding: 2rem 1.25rem 4rem;
  max-width: 60rem; font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } code { font-size: .9em; }
.verdict { border-left: 6px solid var(--tone); background: var(--card); border-radius: 6px;
  padding: .9rem 1.1rem; margin: 1.2rem 0; overflow-wrap: anywhere; }
.word { color: var(--tone); font-weight: 700; letter-spacing: .04em; text-transform: uppercase; }
.fit { --tone: var(--fit); } .doubtful { --tone: var(--doubtful); }
.unfit { --tone: var(--unfit); } .note { --tone: var(--note); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; }
.card { background: var(--card); border-radius: 6px; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { border-bottom: 1px solid var(--rule); padding: .4rem .9rem .4rem 0; vertical-align: top; }
td.long { min-width: 11rem; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td.word { white-space: nowrap; font-size: .8rem; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--soft); }
@media print { body { max-width: none; padding: 0; } details { display: block; } }
"""
