"""`verl doctor`: what works on this machine and what does not, found out by doing it.

What always holds: every probe runs in a process of its own with a limited time, so a package that hangs, crashes
or lies costs one line and nothing else; this process imports nothing heavy; nothing is changed but a file of some
megabytes that is written to measure the disk and removed.
"""
