"""A stand-in for SGLang that follows its HTTP interface, so that the adapter can be tested where SGLang cannot run."""
