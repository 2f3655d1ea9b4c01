"""Tools that a YAML file names (`multi_turn.tools=tools.yaml`): the class they subclass and its types."""
