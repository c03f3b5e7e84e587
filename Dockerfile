# Images for training with megabench. Build in the repository root:
#   docker build --target plain --tag megabench .                # Python and the CUDA packages of PyPI
#   docker build --target nvidia --tag megabench .               # NVIDIA's PyTorch, with Transformer Engine and apex
#   docker build --target efa --build-arg EFA_BASE=nvidia --tag megabench .      # one of the two, with EFA
# tests/launch/dockerfile_in_chroot.py runs the steps of `plain` without Docker. `nvidia` and `efa` are untested.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG NVIDIA_IMAGE=nvcr.io/nvidia/pytorch:26.07-py3
ARG EFA_BASE=plain

FROM ${PYTHON_IMAGE} AS plain
# DeepSpeed, megatron-core and Triton compile code at run time, which needs a C and C++ compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ gcc make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megabench
COPY . .
# Extras of pyproject.toml: "gpu" for fused kernels, empty for none
ARG EXTRAS=gpu
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
CMD ["megabench", "--help"]

# Untested.
FROM ${NVIDIA_IMAGE} AS nvidia
WORKDIR /opt/megabench
COPY . .
ARG EXTRAS=gpu
# pip must keep the image's torch and what was built against it. The image's own constraints pin many more packages, to
# versions that are too old for megabench, so they are replaced.
RUN pip list --format=freeze | grep -iE '^(torch|torchvision|(pytorch-)?triton|apex|transformer.engine|flash.attn)==' \
        >/tmp/kept.txt \
    && PIP_CONSTRAINT=/tmp/kept.txt pip install --no-cache-dir ".[${EXTRAS}]" \
    && pip list --format=freeze | grep -ixFf /tmp/kept.txt | diff - /tmp/kept.txt
CMD ["megabench", "--help"]

# Untested. Installs libfabric and aws-ofi-nccl. The host has the kernel module.
FROM ${EFA_BASE} AS efa
ARG EFA_BASE
ARG EFA_INSTALLER_VERSION=1.51.0
# The fingerprint is the one in AWS's EC2 user guide, "Get started with EFA and NCCL".
ARG EFA_KEY=4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC
# NCCL loads the plugin by its name, so ldconfig must know its directory. Without a plugin, `grep .` ends the build.
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates curl gnupg \
    && mkdir /tmp/efa && cd /tmp/efa \
    && url=https://efa-installer.amazonaws.com file=aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz \
    && curl --fail --remote-name-all $url/aws-efa-installer.key $url/$file $url/$file.sig \
    && gpg --import aws-efa-installer.key \
    && gpg --status-fd 1 --verify $file.sig | grep "VALIDSIG.* ${EFA_KEY}" \
    && tar -xf $file && cd aws-efa-installer \
    && options="--skip-kmod --skip-limit-conf --no-verify" \
    && if [ "${EFA_BASE}" = nvidia ]; then options=--enable-ngc; fi \
    && ./efa_installer.sh --yes $options \
    && find /opt/amazon -name 'libnccl-net*.so' -printf '%h\n' | sort -u >/etc/ld.so.conf.d/aws-ofi-nccl.conf \
    && grep . /etc/ld.so.conf.d/aws-ofi-nccl.conf \
    && ldconfig && rm -rf /tmp/efa /root/.gnupg /var/lib/apt/lists/*
