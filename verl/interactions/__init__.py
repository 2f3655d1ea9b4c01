"""Interactions that a YAML file names (`multi_turn.environment=interactions.yaml`): the class they subclass."""
