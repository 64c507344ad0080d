"""Fixtures of the server's tests: the application over a fake engine, and servers as processes of their own."""

import sys
from pathlib import Path

# Test folders are no packages: what tests share is imported by name from this folder.
sys.path.insert(0, str(Path(__file__).parent))
