"""Import paths of verl that plug-ins use; everything here is defined elsewhere."""
