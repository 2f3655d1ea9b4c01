"""The config: schema, aliases, loading and overrides, checks, batch arithmetic, the plan. Imports no torch."""
