"""The config: schema, aliases, loading and overrides, checks, batch arithmetic, the plan. Imports no torch.

Import from the modules: `verl.config.schema` (the dataclasses), `verl.config.load` (`load_ppo_config`,
`load_sft_config`, `from_dict`), `verl.config.checks`, `verl.config.plan`.
"""
