# Image for a GPU host: the learner's environment is .venv, the SGLang servers' is .venv-sglang. A run starts the servers.
# The host needs Docker, the NVIDIA container toolkit and a driver for CUDA 13 (580 or newer).
#   docker build -f configs/launch/gpu.Dockerfile -t paravt-gpu .
#   docker run --rm -it --gpus all --ipc host -v /runs:/runs paravt-gpu paravt check --quick
# Not tested with Docker.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# The servers compile kernels at startup, which needs CUDA's compiler and Python.h (python3-dev).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libnuma1 ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /paravt
# Layers that change rarely come first, so that a code change does not reinstall them.
COPY requirements requirements
COPY scripts/setup_sglang.sh scripts/install_locked.sh scripts/
RUN bash scripts/setup_sglang.sh cuda
COPY . .
RUN bash scripts/setup.sh cuda12
ENV PATH=/paravt/.venv/bin:$PATH
CMD ["paravt", "help"]
