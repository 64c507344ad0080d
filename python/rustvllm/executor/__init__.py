"""Where the workers are: in this process, for now."""

import os

# Read when torch is loaded, which every worker does after this. A thread of torch that spins while it waits, as it does
# by default for milliseconds after every product, takes a processor from the core's threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
