"""The scripts that make parts of the documentation are imported as they are run: from scripts/."""

import sys

from support.models import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
