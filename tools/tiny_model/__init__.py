"""The parts of `tools/train_tiny_model.py`: corpus, tokenizer, training and evaluation of the embedded model."""
