# The executor, with torch. Build from the repository's root:
#   docker build -f deploy/executor.Dockerfile -t lorafleet-executor:0.1.0 .
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/lorafleet
COPY pyproject.toml README.md LICENSE constraints.txt ./
# torch by itself, so that a change of our code does not fetch it again.
RUN /opt/lorafleet/bin/pip install --no-cache-dir --constraint constraints.txt torch
COPY lorafleet lorafleet
COPY scheduler scheduler
COPY adapter_store adapter_store
COPY executor executor
COPY kernels kernels
RUN /opt/lorafleet/bin/pip install --no-cache-dir --constraint constraints.txt '.[executor,redis]'

FROM python:3.12-slim
RUN useradd --uid 10001 --no-create-home lorafleet
COPY --from=build /opt/lorafleet /opt/lorafleet
USER 10001
EXPOSE 50061 50062 9401
ENTRYPOINT ["/opt/lorafleet/bin/python", "-m", "executor"]
