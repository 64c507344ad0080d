"""Drafts in a step: a second model that makes them, the rows of logits that they have, and which of them are right."""
