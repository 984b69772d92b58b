# The trainer with the versions of requirements.txt; torch's wheel carries its own CUDA libraries, the host only needs a driver.
#
#   docker build -t speedrun .
#   docker run --rm --gpus all --ipc=host -v "$PWD/data/fineweb10B:/speedrun/data/fineweb10B" -v "$PWD/logs:/speedrun/logs" speedrun
#
# Options of run.sh and train_gpt.py follow the image's name, or: sample MODEL "text", where the model is in a mounted folder. The mounted folders must be writable for user 1000.
# --ipc=host: NCCL's ranks share memory, and Docker's default of 64 MB is too little for eight.
FROM python:3.12-slim

# Triton compiles a small C launcher for each kernel, against Python's own headers, which the base image has
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /speedrun
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt

RUN useradd --create-home --uid 1000 trainer \
 && mkdir -p data/fineweb10B logs \
 && chown -R trainer:trainer /speedrun
USER trainer

COPY --chown=trainer:trainer run.sh train_gpt.py sample.py LICENSE README.md requirements.txt requirements-dev.txt ./
COPY --chown=trainer:trainer data/fineweb.py data/hellaswag.py data/README.md data/
COPY --chown=trainer:trainer benchmarks/compile_ahead.py benchmarks/
COPY --chown=trainer:trainer data/sample data/sample

ENTRYPOINT ["./run.sh"]
