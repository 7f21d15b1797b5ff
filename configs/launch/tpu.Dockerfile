# The image of a TPU host. A TPU has no SGLang server: it samples with the embedded engine.
#   docker build -f configs/launch/tpu.Dockerfile -t IMAGE . && docker push IMAGE
# Its steps were never run by Docker.
FROM python:3.12-slim-bookworm
WORKDIR /paravt
COPY . .
RUN bash scripts/setup.sh tpu
ENV PATH=/paravt/.venv/bin:$PATH
CMD ["paravt", "help"]
