"""A recipe from its model to its evidence: plan, engine, checkpoint, verification."""
