"""Executors: run an engine's steps in this process, in several processes, on several machines, or simulate them."""

import os

# torch reads this when it is loaded, which every worker does later. By default torch's threads spin for milliseconds
# after every product while they wait, which takes processor time from the core's threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
