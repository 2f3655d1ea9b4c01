"""vLLM as a rollout engine: in the trainer's process, or as a server (`rollout.mode=server`).

`settings` maps our config keys to vLLM's, `worker` runs inside its workers, `engine` drives vLLM's engine from this
process and `server` its HTTP server; `base` is what both share. Only these files import vllm.
"""
