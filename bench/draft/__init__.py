"""Train a draft for a target: the target writes text, the draft learns to guess it, the result is a GGUF."""
