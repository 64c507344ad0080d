"""Puts the helpers beside these tests, and the naive scheduler, on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "worker")]
