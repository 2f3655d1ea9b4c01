"""The embedded default: a tiny model that learns to answer word problems, on any machine, with no download.

Everything here goes through the ordinary commands (`verl sft`, `verl train`) with ordinary files and overrides.
This room may write to the terminal: it is the program's own show.
"""
