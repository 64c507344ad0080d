"""Dense layers, embeddings and norms on the CPU, computed by the Rust core where that is the fastest."""
