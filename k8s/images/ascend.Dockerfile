# syntax=docker/dockerfile:1
# docker build -f k8s/images/ascend.Dockerfile -t ray-lora:ascend .
# The image holds CANN; the driver is the node's and comes in when the pod starts.
ARG CANN=9.1.0-910b-ubuntu22.04-py3.12

FROM quay.io/ascend/cann:${CANN}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
USER 0
WORKDIR /opt/ray_lora
COPY . .
# KubeRay's probes call bash and wget. g++ builds our CPU kernels here, and Triton's launchers when a rank starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash wget g++ libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home ray \
    && pip install --no-cache-dir --editable ".[npu,remote]"
# Bash reads this file whenever KubeRay starts it, by a login shell or not, so `ray start` and its workers find CANN.
ENV BASH_ENV=/opt/ray_lora/k8s/images/cann_env.sh \
    PYTHONUNBUFFERED=1
USER 1000
CMD ["ray-lora", "--help"]
