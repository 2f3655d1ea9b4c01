"""Training on megatron-core: tensor, pipeline, context and expert parallelism. Only this package imports megatron."""

import warnings

with warnings.catch_warnings():
    # It says for each of its modules that Transformer Engine and Apex are missing, which are not used here.
    warnings.simplefilter("ignore", UserWarning)
    import megatron.core
    import megatron.core.models.gpt  # noqa: F401
