# syntax=docker/dockerfile:1
# One image for every part; docker-compose.yml says which command makes it which part. Without a
# command it is the whole service in one container:
#   docker run --init --rm -p 127.0.0.1:8099:8099 -v diffusion:/data diffusion-replicas

FROM python:3.11-slim

# Package index with the builds of torch for your CUDA version, or for CPU only (a far smaller
# image), as PyTorch's installation page names it. Without one: the builds of the Python Package Index.
ARG TORCH_INDEX=""

# Debian packages besides: "gcc libc6-dev" for stages that compile blocks (diffusion_compile_granularity),
# since Triton builds its launchers with a C compiler.
ARG PACKAGES=""

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

RUN if [ -n "$PACKAGES" ]; then apt-get update \
 && apt-get install --yes --no-install-recommends $PACKAGES \
 && rm -rf /var/lib/apt/lists/*; fi

WORKDIR /service
COPY requirements.txt .
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements.txt

RUN useradd --create-home --uid 10001 service \
 && install --directory --owner=service --group=service /data /data/outputs /data/hub
COPY . .

USER service
ENV RUN_DIR=/data \
    OUTPUTS_URL=/data/outputs \
    HF_HOME=/data/hub
VOLUME /data
EXPOSE 8099
CMD ["python", "-m", "scripts.serve", "--host", "0.0.0.0"]
