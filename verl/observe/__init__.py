"""Metrics, run folder, trackers, health rules, report and view. Called by all packages, calls none of them."""
