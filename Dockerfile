# On a CPU:  docker build -t pointup .
# On CUDA:   docker build -t pointup --build-arg TORCH=https://download.pytorch.org/whl/cu128 \
#                --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
# Run:       docker run --rm -v "$PWD:/data" pointup upsample survey.laz -o dense.laz
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH=https://download.pytorch.org/whl/cpu

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Bases of CUDA have no Python. Triton compiles its launchers with gcc and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && if ! command -v python3; then \
        apt-get install -y --no-install-recommends gcc python3-dev python3-venv; \
    fi \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/pointup
ENV PATH=/opt/pointup/bin:$PATH

RUN pip install --no-cache-dir "torch>=2.10,<2.14" --index-url "${TORCH}"
COPY . /src
RUN pip install --no-cache-dir "/src[e57,pcd,rasters]" && rm -rf /src
WORKDIR /data
ENTRYPOINT ["pointup"]
CMD ["--help"]
