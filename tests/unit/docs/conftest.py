"""Makes the scripts in docs/build/, which generate parts of the documentation, importable."""

import sys

from support.models import ROOT

sys.path.insert(0, str(ROOT / "docs" / "build"))
