# The whole repository with the versions of requirements-dev.txt; torch's wheel carries its own CUDA libraries, the host only needs a driver.
#
#   docker build -t speedrun .
#   docker run --rm --gpus all --ipc=host -v "$PWD/data/fineweb10B:/speedrun/data/fineweb10B" -v "$PWD/logs:/speedrun/logs" speedrun
#   docker run --rm speedrun test
#   docker run --rm --entrypoint python speedrun records verify records/2026-11-26_shorter-1gpu
#
# What follows the image's name are options of run.sh and train_gpt.py, or: sample MODEL "text", where the model is in a mounted folder.
# The mounted folders must be writable for user 1000.
# --ipc=host: NCCL's ranks share memory, and Docker's default of 64 MB is too little for eight.
FROM python:3.12-slim

# Triton compiles a small C launcher for each kernel, against Python's own headers, which the base image has. A record's checks ask git.
# tini is process 1: it passes signals on, and collects processes whose parents have ended.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc git libc6-dev tini \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /speedrun
COPY requirements.txt requirements-dev.txt ./
RUN pip install --no-cache-dir -r requirements-dev.txt

# .dockerignore leaves out what git ignores
COPY . .
RUN useradd --create-home --uid 1000 trainer \
 && mkdir -p data/fineweb10B logs \
 && chown -R trainer:trainer /speedrun
USER trainer

ENTRYPOINT ["tini", "-g", "--", "./run.sh"]
