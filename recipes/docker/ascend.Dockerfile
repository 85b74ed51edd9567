# Trains on Ascend 910C (A3) cards; for 910B (A2) replace a3 by 910b in the name of the base image. Not run yet: no card
# was available during development.
#   docker build -f recipes/docker/ascend.Dockerfile -t rlfusion:0.1.0-ascend .    in the checkout
#   docker run --rm --shm-size=16g --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm \
#     --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v "$PWD/runs:/work/runs" \
#     rlfusion:0.1.0-ascend rlfusion smoke --report runs/ascend_smoke.json
# CANN 9.1.0 is what vllm-ascend 0.26.0rc1 names for torch_npu 2.10.0.post4.
FROM quay.io/ascend/cann:9.1.0-a3-ubuntu22.04-py3.11

# What CANN's set_env.sh sets, as variables of the image: `kubectl exec`, and start commands that replace the entry point
# (KubeRay's), do not pass through it.
ENV ASCEND_TOOLKIT_HOME=/usr/local/Ascend/ascend-toolkit/latest
ENV ASCEND_HOME_PATH=${ASCEND_TOOLKIT_HOME} \
    ASCEND_AICPU_PATH=${ASCEND_TOOLKIT_HOME} \
    ASCEND_OPP_PATH=${ASCEND_TOOLKIT_HOME}/opp \
    TOOLCHAIN_HOME=${ASCEND_TOOLKIT_HOME}/toolkit \
    PYTHONPATH=${ASCEND_TOOLKIT_HOME}/python/site-packages:${ASCEND_TOOLKIT_HOME}/opp/built-in/op_impl/ai_core/tbe:${PYTHONPATH} \
    PATH=${ASCEND_TOOLKIT_HOME}/bin:${ASCEND_TOOLKIT_HOME}/compiler/ccec_compiler/bin:${PATH} \
    LD_LIBRARY_PATH=${ASCEND_TOOLKIT_HOME}/lib64:${ASCEND_TOOLKIT_HOME}/lib64/plugin/opskernel:${ASCEND_TOOLKIT_HOME}/lib64/plugin/nnengine:/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/common:/usr/local/Ascend/driver/lib64/driver:${LD_LIBRARY_PATH}

# torch and torch_npu as in requirements/ascend.txt.
COPY requirements/ascend.txt /tmp/ascend.txt
RUN pip install --no-cache-dir -r /tmp/ascend.txt "ray[default]==2.60.0" && rm /tmp/ascend.txt

COPY . /tmp/rlfusion
RUN pip install --no-cache-dir /tmp/rlfusion && rm -rf /tmp/rlfusion

# User 1000 is HwHiAiUser on hosts with Ascend's driver: the owner of /dev/davinci*. Ray lets all users write to its
# temporary folder: it is in /ray, which only this user may enter.
RUN { getent group 1000 || groupadd --gid 1000 HwHiAiUser; } \
    && { getent passwd 1000 || useradd --create-home --uid 1000 --gid 1000 ray; } \
    && mkdir /work && chown 1000:1000 /work && install -d -m 700 -o 1000 /ray
# Login shells, with which KubeRay may start Ray, set PATH anew.
RUN printf 'export PATH="%s"\n' "${PATH}" > /etc/profile.d/rlfusion.sh && bash -lc 'rlfusion --help' > /dev/null
USER 1000
WORKDIR /work
# TOKENIZERS_PARALLELISM is no secret.
# hadolint ignore=DL3064
ENV OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
    MALLOC_ARENA_MAX=2 RAY_task_events_report_interval_ms=0 RAY_TMPDIR=/ray
CMD ["rlfusion", "--help"]
