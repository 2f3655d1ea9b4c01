#!/usr/bin/env bash
# Everything about the native rollout engine that needs a CUDA device, most important first and within about five
# minutes: kernels against their references, tokens per second (128 prompts x 8, 128 x 64, 1,024 x 1) and start to
# first token, the engine against transformers and the trainer, the large shape in bf16 and fp8. Each part has a time limit, so that one that hangs
# does not cost the others. Logs also go to the folder given as first argument (default: none); with a second
# argument the kernels are timed one by one, too. VERL_SMOLLM2 may name a folder with the trained SmolLM2-135M.
# (A whole GRPO step is measured by `python -m benchmarks.step`.)
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=. PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
logs=${1:-$(mktemp -d)}
part() { # name, seconds, command...
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  local start=$SECONDS
  timeout "$limit" "$@" > "$logs/$name.log" 2>&1
  local code=$?
  case $name in
    kernels) grep -v '^ok' "$logs/$name.log" | tail -n 15; grep -c '^ok' "$logs/$name.log" ;;
    *) tail -n 60 "$logs/$name.log" | cut -c 1-190 ;;
  esac
  echo "== $name: exit $code after $((SECONDS - start)) s"
}
python3 -c 'import torch, triton, transformers; print(torch.__version__, triton.__version__, transformers.__version__)'
part kernels 60 python3 tests/rollout/kernel_checks.py
part smollm2 90 python3 -m benchmarks.rollout --model smollm2-135m --profile --first-token --repeat 3
part smollm2_128x64 60 python3 -m benchmarks.rollout --model smollm2-135m --prompts 128 --n 64 --repeat 1
part smollm2_1024x1 60 python3 -m benchmarks.rollout --model smollm2-135m --prompts 1024 --n 1 --repeat 2
part engine 120 python3 tests/rollout/device_checks.py
part qwen7b 90 python3 -m benchmarks.rollout --model qwen2.5-7b --repeat 2
part qwen7b_fp8 90 python3 -m benchmarks.rollout --model qwen2.5-7b --repeat 1 --dtype fp8
[ -z "${2:-}" ] || part timings 110 python3 benchmarks/rollout_kernels.py --seconds 90
