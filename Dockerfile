# docker build -t tba .                                           CPU
# docker build -t tba --build-arg TORCH=cu130 .                   CUDA 13, or cu126; the driver and its container toolkit are the host's
# docker build -t tba --build-arg EXTRAS=lora,gguf,math .         with optional requirements of pyproject.toml
# docker build -t tba --build-arg TORCH=cu130 --build-arg CONSTRAINTS=constraints-vllm.txt --build-arg EXTRAS=cluster,vllm .
# docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" tba train quickstart
# docker run --rm -v "$PWD:/work" --gpus all --shm-size 16g tba train gsm8k --model.path MODEL
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG TORCH=cpu
ARG EXTRAS=
# vllm pins other versions than the rest: constraints-vllm.txt
ARG CONSTRAINTS=constraints.txt

# torch compiles kernels when a run begins; KubeRay asks a node's health by wget
RUN apt-get update && apt-get install -y --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/*

COPY constraints*.txt /src/
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" -c "/src/${CONSTRAINTS}" torch

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
COPY examples /src/examples
RUN pip install --no-cache-dir -c "/src/${CONSTRAINTS}" "/src${EXTRAS:+[${EXTRAS}]}" && rm -r /src

# any user of the host may run it, in a folder of the host
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["tba"]
CMD ["--help"]
