"""The frozen value that YAML spells, and the order of its passes."""
