"""Triton kernels of the native engine. Each has a torch reference in `verl.rollout.native.ops` that it must equal;
the tests run both on the CPU, the kernels in Triton's interpreter.

Rounding follows the Hugging Face modules step by step (a norm rounds before it multiplies by its weight, a
rotation rounds each product), so that bf16 log-probs stay close to those the trainer recomputes.
"""
