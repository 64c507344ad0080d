"""One module per endpoint, and how its request becomes a prompt and sampling parameters."""
