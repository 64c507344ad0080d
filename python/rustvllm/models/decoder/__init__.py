"""What decoders of several families share."""
