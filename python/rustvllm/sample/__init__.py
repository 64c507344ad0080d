"""From logits to token ids: penalties, truncation, and random numbers that depend on a request alone."""
