"""What a GGUF file says about its model: architecture, hyperparameters, vocabulary."""
