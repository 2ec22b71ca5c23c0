"""Opening models: hub ids, folders and GGUF files; weights memory-mapped until they are needed; loading checkpoints."""
