#!/usr/bin/env bash
# Everything about the native rollout engine that needs a CUDA device, most important first: kernels against their
# references, the engine against transformers, tokens per second, start-up, where the time goes. Each part has a
# time limit, so that one that hangs does not cost the others. Logs also go to the folder given (default: none).
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
part kernels 110 python3 tests/rollout/kernel_checks.py
part smollm2 100 python3 benchmarks/rollout.py --model smollm2-135m --profile --first-token
part qwen7b 130 python3 benchmarks/rollout.py --model qwen2.5-7b --profile --repeat 1
part engine 130 python3 tests/rollout/device_checks.py
part timings 110 python3 benchmarks/rollout_kernels.py --seconds 90
