"""What the author of a pass imports: contract, observers, options, facts, journal, run."""
