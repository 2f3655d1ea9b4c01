"""`verl demo`: a tiny model learns to answer word problems, on any machine, with no download.

It runs the ordinary commands (`verl sft`, `verl train`) with ordinary files and overrides.
"""
