"""From logits to token ids: penalties, truncation, and random numbers that depend only on the request."""
