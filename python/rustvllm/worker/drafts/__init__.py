"""Drafts in a step: the second model that makes them, their rows of logits, and the check of which are right."""
