# syntax=docker/dockerfile:1.7
# Images of MoK service. Targets:
#   api         `mok api`, `mok db`: no torch, no Ray
#   cpu-worker  `mok worker`, the Ray head, Ray nodes without GPUs
#   worker      Ray nodes with NVIDIA GPUs (driver on the host, nvidia-container-toolkit)
#
# All run as user 10001, hold no secret, and have the same Python: a scheduler and its Ray nodes must. Base images are pinned by
# tag; who wants them by digest passes UBUNTU and CUDA_* with one. Packages come with hashes from requirements/lock.txt; torch is
# pinned by version only, since one hashed lock can't serve its CPU and its CUDA build (CONTRIBUTING.md).
ARG UBUNTU=ubuntu:24.04
ARG CUDA_BUILD=nvidia/cuda:13.0.1-devel-ubuntu24.04
# torch brings CUDA's libraries and libmok_cuda is linked statically: nothing but the base is needed to run.
ARG CUDA_RUN=nvidia/cuda:13.0.1-base-ubuntu24.04

# ---- what every image has --------------------------------------------------------------------------------------------
FROM ${UBUNTU} AS base
# Versions of Ubuntu's packages aren't pinned: its mirrors drop old ones. The release says what may be installed.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates postgresql-client python3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 mok && useradd --uid 10001 --gid mok --no-create-home --home-dir /var/lib/mok mok \
    && install -d -o mok -g mok -m 0700 /var/lib/mok /var/lib/ray /backups && install -d -o mok -g mok /var/lib/mok/checkpoints
ENV PATH=/opt/mok/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    MOK_DATA_DIR=/var/lib/mok MOK_CHECKPOINT_DIR=/var/lib/mok/checkpoints
WORKDIR /var/lib/mok

# ---- wheels ----------------------------------------------------------------------------------------------------------
FROM base AS tools
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/mok
WORKDIR /src
COPY requirements requirements

FROM tools AS everything
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/lock.txt

FROM everything AS cpu-wheel
COPY . .
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# ---- api -------------------------------------------------------------------------------------------------------------
FROM tools AS api-packages
# The lock without what only trains, schedules or builds.
RUN awk 'BEGIN { split("cmake fsspec hf-xet huggingface-hub mpmath msgpack networkx ninja numpy protobuf ray safetensors " \
                       "scikit-build-core sympy tokenizers tqdm", names, " "); for (i in names) drop[names[i]] } \
         /^[a-z0-9]/ { split($0, word, "=="); skip = word[1] in drop } !skip' requirements/lock.txt > api.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r api.txt
RUN --mount=from=cpu-wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl && pip check && python -c 'import mok_api.server, mok_service.cli.db'

FROM base AS api
COPY --from=api-packages /opt/mok /opt/mok
USER 10001:10001
EXPOSE 8080
ENV MOK_HOST=0.0.0.0 MOK_PORT=8080 MOK_REQUIRE_KEYS=true
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
CMD ["mok", "api"]

# ---- cpu-worker ------------------------------------------------------------------------------------------------------
FROM everything AS cpu-packages
# An index of CPU builds of torch, if one is known, saves gigabytes.
ARG PIP_EXTRA_INDEX_URL=
RUN PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL}" pip install --no-cache-dir -r requirements/torch-cpu.txt
RUN --mount=from=cpu-wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl && pip check

FROM base AS cpu-worker
COPY --from=cpu-packages /opt/mok /opt/mok
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import psutil, sys; sys.exit('raylet' not in {p.name() for p in psutil.process_iter()})"]
CMD ["mok", "worker"]

# ---- worker ----------------------------------------------------------------------------------------------------------
FROM ${CUDA_BUILD} AS cuda-packages
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-venv && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/mok
ENV PATH=/opt/mok/bin:$PATH
WORKDIR /src
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/lock.txt \
    && pip install --no-cache-dir torch==2.13.0
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --config-settings=cmake.define.MOK_CUDA=ON . && pip check \
    && python -c 'from mok_service.kernels.library import library_path; library_path("cuda")'

FROM ${CUDA_RUN} AS worker
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 mok && useradd --uid 10001 --gid mok --no-create-home --home-dir /var/lib/mok mok \
    && install -d -o mok -g mok -m 0700 /var/lib/mok /var/lib/ray /backups && install -d -o mok -g mok /var/lib/mok/checkpoints
ENV PATH=/opt/mok/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 CUDA_DEVICE_ORDER=PCI_BUS_ID
WORKDIR /var/lib/mok
COPY --from=cuda-packages /opt/mok /opt/mok
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import psutil, sys; sys.exit('raylet' not in {p.name() for p in psutil.process_iter()})"]
CMD ["mok", "--help"]
