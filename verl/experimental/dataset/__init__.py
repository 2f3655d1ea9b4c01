"""Import paths of verl that samplers use; their home is `verl.data.samplers`."""
