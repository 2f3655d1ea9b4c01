"""Import paths of verl that reward managers use; their home is `verl.reward.manager_classes`."""
