"""What the user sees of a run. Observe is called by everyone and calls nobody."""
