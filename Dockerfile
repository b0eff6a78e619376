# Every node of a cluster on Kubernetes (configs/ray/kuberay.yaml); without a GPU it serves too:
#   docker build -t pd-cluster . && docker run --network host pd-cluster pd-cluster serve
# The image has CUDA's compiler: flashinfer and Triton build kernels for the GPU that they find.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        g++ ibverbs-providers libibverbs1 librdmacm1 python3 python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*

# The image's own user of the id 1000 would be in the way.
RUN userdel --remove ubuntu && useradd --create-home --home-dir /srv/pd --uid 1000 pd
USER pd
WORKDIR /srv/pd
ENV PATH=/srv/pd/venv/bin:$PATH
RUN python3 -m venv venv && mkdir -p .cache/pd-cluster

COPY --chown=pd . pd-cluster
# The dashboard's extra is for the operator, which asks it for the head's health.
RUN pip install --no-cache-dir -c pd-cluster/constraints.txt './pd-cluster[gpu]' 'ray[default]'

EXPOSE 30000
CMD ["pd-cluster", "serve", "--host", "0.0.0.0"]
