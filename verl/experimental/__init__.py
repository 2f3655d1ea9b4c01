"""Import paths of verl that agent loops use; everything here is defined elsewhere."""
