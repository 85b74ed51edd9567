# Trains on NPUs emulated on the CPU; also the image of Ray's nodes on Kubernetes (recipes/kuberay.yaml).
#   docker build -f recipes/docker/cpu.Dockerfile -t rlfusion:0.1.0-cpu .          in the checkout
#   docker run --rm --shm-size=4g -v "$PWD/runs:/work/runs" rlfusion:0.1.0-cpu rlfusion doctor
FROM python:3.11.13-slim-bookworm

# The compiler builds the emulated NPU at its first use. bookworm is frozen, so these follow its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ procps wget \
    && rm -rf /var/lib/apt/lists/*

# torch and Ray first: they change less often than the sources.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir "ray[default]==2.60.0"

COPY . /tmp/rlfusion
RUN pip install --no-cache-dir /tmp/rlfusion && rm -rf /tmp/rlfusion

# Ray lets all users write to its temporary folder: it is in /ray, which only this user may enter.
RUN useradd --create-home --uid 1000 ray && mkdir /work && chown ray /work && install -d -m 700 -o ray /ray
USER 1000
WORKDIR /work
# TOKENIZERS_PARALLELISM is no secret.
# hadolint ignore=DL3064
ENV OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
    MALLOC_ARENA_MAX=2 RAY_task_events_report_interval_ms=0 RAY_TMPDIR=/ray
RUN python -c "from fusion.npu import open_device; open_device('emulated')"
CMD ["rlfusion", "--help"]
