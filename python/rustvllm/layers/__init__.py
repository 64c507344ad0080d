"""Building blocks of models: linear maps, embeddings, norms, activations and rotary positions."""
