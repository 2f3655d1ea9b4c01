"""`verl doctor`: checks of this machine, a config or a run folder.

Probes run in child processes with time limits, so that a package that hangs or crashes costs one line of the report.
"""
