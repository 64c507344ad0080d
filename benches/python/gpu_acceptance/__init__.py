"""What ``gpu_accept.py`` checks and measures: one module for each kind of section."""
