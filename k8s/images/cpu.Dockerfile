# syntax=docker/dockerfile:1
# docker build -f k8s/images/cpu.Dockerfile -t ray-lora:cpu .
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
# CPU builds of torch; from your own mirror if you have one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements.lock /opt/ray_lora/
RUN pip install --no-cache-dir --no-deps --extra-index-url "${TORCH_INDEX}" -r /opt/ray_lora/requirements.lock
WORKDIR /opt/ray_lora
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .

FROM python:${PYTHON}
# KubeRay's probes call bash and wget. libgomp: the threads of torch and of our kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash wget libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home ray
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/ray_lora /opt/ray_lora
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONUNBUFFERED=1
WORKDIR /opt/ray_lora
USER 1000
CMD ["ray-lora", "--help"]
