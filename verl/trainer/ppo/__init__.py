"""The import path plug-ins know; everything lives in `verl.algorithms`."""
