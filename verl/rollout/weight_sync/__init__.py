"""Weights on their way from the trainer to an engine that keeps its own copy of them.

`weights` is what leaves (`adapters` where only a LoRA adapter does), `buckets` and `collective` how it crosses to other
processes, `receiving` and `arriving` where it ends, `fingerprint` and `probe` how both sides know that the same weights
arrived and are the ones computed with.

What always holds: after a hand-over the engine generates from exactly what the trainer sent, or the run stops
with both values in the message.
"""

from verl.rollout.weight_sync.fingerprint import Manifest, compare, fingerprint
from verl.rollout.weight_sync.probe import ProbeCheck, probe_request
from verl.rollout.weight_sync.weights import with_tied_head

__all__ = [
    "Manifest",
    "ProbeCheck",
    "compare",
    "fingerprint",
    "probe_request",
    "with_tied_head",
]
