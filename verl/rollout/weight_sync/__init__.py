"""Weights from the trainer to an engine that keeps a copy of them.

Same process: by reference. Same node: `shared_memory` (CUDA IPC between GPU processes). Other nodes: `broadcast`.
`fingerprint` and `probe` check that what was sent is what arrived, and what the engine computes with; a
difference stops the run.
"""
