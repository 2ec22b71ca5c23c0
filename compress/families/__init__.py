"""What kinds of passes share: quantizing, pruning, allocation, training, reconstruction, reshaping."""
