"""Where the workers are: in this process, for now."""
