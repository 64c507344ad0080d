"""The checks and measurements of ``gpu_accept.py``: one module for each kind of section."""
