"""A request on its way to the engine: what a caller gives, and what it is made into."""
