"""Ranks that share one model: how they find each other, and the collectives and stages that carry their tensors."""
