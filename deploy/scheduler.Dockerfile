# The scheduler: no torch, no GPU. Build from the repository's root:
#   docker build -f deploy/scheduler.Dockerfile -t lorafleet-scheduler:0.1.0 .
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/lorafleet
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY lorafleet lorafleet
COPY scheduler scheduler
COPY adapter_store adapter_store
COPY executor executor
COPY kernels kernels
RUN /opt/lorafleet/bin/pip install --no-cache-dir --constraint constraints.txt '.[scheduler,redis]'

FROM python:3.12-slim
RUN useradd --uid 10001 --no-create-home lorafleet
COPY --from=build /opt/lorafleet /opt/lorafleet
USER 10001
# gRPC's threads take and free parts of messages: with an arena of malloc each, 24 messages of 11 MiB at once, over and
# over, left 240 MB unused in them, and with two 90 MB.
ENV MALLOC_ARENA_MAX=2
EXPOSE 50051 50052 9400
ENTRYPOINT ["/opt/lorafleet/bin/python", "-m", "scheduler"]
