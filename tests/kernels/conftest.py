"""The helpers beside these tests are importable, and torch does not fight the other tests for cores."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
