"""The evidence of a run: one report.json, and report.md for people."""
