"""The processes of one server: how they start, watch and end each other, and what they send."""
