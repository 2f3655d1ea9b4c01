"""Import paths of verl that reward functions and plug-ins use; everything here is defined elsewhere."""
