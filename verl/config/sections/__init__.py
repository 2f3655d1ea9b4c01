"""The sections of the config, one file per subject. `verl.config.schema` joins them."""
