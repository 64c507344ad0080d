"""Building blocks of models: dense layers, embeddings, norms, activations and rotary positions."""
