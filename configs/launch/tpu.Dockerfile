# Image for a TPU host, which samples with the embedded engine.
#   docker build -f configs/launch/tpu.Dockerfile -t IMAGE . && docker push IMAGE
# Not tested with Docker.
FROM python:3.12-slim-bookworm
WORKDIR /paravt
COPY . .
RUN bash scripts/setup.sh tpu
ENV PATH=/paravt/.venv/bin:$PATH
CMD ["paravt", "help"]
