# Trains on Ascend 910C (A3) cards; for 910B (A2) replace a3 by 910b in the name of the base image. Not run yet: no card
# was available during development.
#   docker build -f recipes/docker/ascend.Dockerfile -t rlfusion:0.1.0-ascend .    in the checkout
#   docker run --rm --shm-size=16g --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm \
#     --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v "$PWD/runs:/work/runs" \
#     rlfusion:0.1.0-ascend rlfusion doctor
FROM quay.io/ascend/cann:8.5.1-a3-ubuntu22.04-py3.11

# torch and torch_npu as in requirements/ascend.txt.
COPY requirements/ascend.txt /tmp/ascend.txt
RUN pip install --no-cache-dir -r /tmp/ascend.txt "ray[default]==2.60.0" && rm /tmp/ascend.txt

COPY . /tmp/rlfusion
RUN pip install --no-cache-dir /tmp/rlfusion && rm -rf /tmp/rlfusion

WORKDIR /work
# TOKENIZERS_PARALLELISM is no secret.
# hadolint ignore=DL3064
ENV OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# CANN's set_env.sh sets the paths of its libraries, for every command.
RUN printf '#!/bin/bash\nsource /usr/local/Ascend/ascend-toolkit/set_env.sh\nexec "$@"\n' > /usr/local/bin/with-cann \
    && chmod 755 /usr/local/bin/with-cann
ENTRYPOINT ["with-cann"]
CMD ["rlfusion", "--help"]
