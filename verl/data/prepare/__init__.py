"""Known datasets, from their own columns to the rows verl trains on."""
