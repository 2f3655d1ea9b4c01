# syntax=docker/dockerfile:1
# verl with Ray and vLLM on NVIDIA GPUs. vLLM decides the version of torch. Build from the root of the repository:
#   docker build --file docker/cuda-vllm.Dockerfile --tag verl:vllm .
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# gcc and Python's headers: Triton compiles its launchers when a kernel first runs. Programs written by a model run in
# bubblewrap's sandbox. Ubuntu's image has a user of id 1000 already.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        bubblewrap gcc git libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 verl \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}

RUN pip install vllm==0.32.0 "ray[default]==2.60.0"

WORKDIR /opt/verl
COPY pyproject.toml README.md LICENSE ./
COPY verl ./verl
# verl is the checkout's, the rest has the ranges of pyproject.toml.
# hadolint ignore=DL3013
RUN pip install '.[peft,math,tensorboard,wandb,mcp,datasets]'

USER 1001
WORKDIR /home/verl
CMD ["verl", "doctor"]
