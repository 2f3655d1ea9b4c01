"""The import path that plug-ins use; everything is in `verl.algorithms`."""
