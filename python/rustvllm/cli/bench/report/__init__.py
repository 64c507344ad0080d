"""What a measurement says: its progress, the machine that it ran on, the figures of a load, and where they go."""
