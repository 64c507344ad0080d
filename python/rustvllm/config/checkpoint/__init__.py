"""What a checkpoint's files say of the model and of its numbers, read without torch and before any weight."""
