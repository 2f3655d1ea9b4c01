"""The sections of the config, one file per room they configure. `verl.config.schema` joins them."""
