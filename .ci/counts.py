"""Adds up the pytest reports of a folder: `12 passed, 0 failed, 1 skipped`."""

import sys
from pathlib import Path
from xml.etree import ElementTree

totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for report in Path(sys.argv[1]).glob("*.xml"):
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, 0))
failed = totals["failures"] + totals["errors"]
passed = totals["tests"] - failed - totals["skipped"]
sys.stdout.write(f"{passed} passed, {failed} failed, {totals['skipped']} skipped\n")
