"""Dense layers, embeddings and norms on the CPU, computed by the Rust core where it is fastest."""
