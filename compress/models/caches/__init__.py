"""How keys and values of attention are stored."""
