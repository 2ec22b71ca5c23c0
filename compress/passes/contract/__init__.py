"""The interface for authors of passes: contract, observers, options, facts, journal, run."""
