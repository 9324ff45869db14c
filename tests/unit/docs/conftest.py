"""The scripts that generate parts of the documentation are imported from docs/build/."""

import sys

from support.models import ROOT

sys.path.insert(0, str(ROOT / "docs" / "build"))
