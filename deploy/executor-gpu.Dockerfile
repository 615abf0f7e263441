# The executor for NVIDIA GPUs. Build from the repository's root:
#   docker build -f deploy/executor-gpu.Dockerfile -t lorafleet-executor-gpu:0.1.0 .
# A development image: Triton needs a C compiler, FlashInfer nvcc and ninja, when kernels are compiled at the first start.
# Its CUDA must be that of the torch build which pip takes.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/lorafleet
COPY pyproject.toml README.md LICENSE constraints.txt ./
# torch by itself, so that a change of our code does not fetch it again.
RUN /opt/lorafleet/bin/pip install --no-cache-dir --constraint constraints.txt torch
COPY lorafleet lorafleet
COPY scheduler scheduler
COPY adapter_store adapter_store
COPY executor executor
COPY kernels kernels
RUN /opt/lorafleet/bin/pip install --no-cache-dir --constraint constraints.txt '.[gpu,redis]'
RUN useradd --uid 10001 --no-create-home lorafleet
USER 10001
EXPOSE 50061 50062 9401
ENTRYPOINT ["/opt/lorafleet/bin/python", "-m", "executor"]
