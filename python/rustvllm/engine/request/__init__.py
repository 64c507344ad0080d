"""A request on its way to the engine and back: what a caller gives, what it is made into, and what comes of it."""
