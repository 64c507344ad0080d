"""The endpoints of engines that end a prompt with a vector: embeddings, classes and scores."""
