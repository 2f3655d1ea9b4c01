# syntax=docker/dockerfile:1
# verl on CPUs: the demo, tests of a reward function, small runs. Build from the root of the repository:
#   docker build --file docker/cpu.Dockerfile --tag verl:cpu .
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE}

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# Programs written by a model run in bubblewrap's sandbox.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 verl

# A build for CPUs: the one of PyPI would bring CUDA. The index can be replaced by a mirror.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX}" torch==2.13.0

WORKDIR /opt/verl
COPY pyproject.toml README.md LICENSE ./
COPY verl ./verl
# verl is the checkout's, the rest has the ranges of pyproject.toml.
# hadolint ignore=DL3013
RUN pip install '.[peft,math,tensorboard]' transformers==5.22.2

USER 1000
WORKDIR /home/verl
CMD ["verl", "demo"]
