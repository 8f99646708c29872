#!/bin/bash
# Download the wheels of these benchmarks for a GPU machine without a network:
#
#     bash benchmarks/gpu/prepare.sh [FOLDER]     # default: .whl, which git ignores; 15 MB
#
# The machine has Linux on x86_64 and Python 3.12 with JAX for CUDA, Flax, Optax, Orbax, torch, transformers and peft.
set -e
FOLDER=${1:-.whl}
platforms=$(printf -- '--platform %s ' manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 \
  manylinux2014_x86_64 manylinux1_x86_64)
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
  --dest "$FOLDER" diffusers==0.42.1 open_clip_torch==3.3.0 ftfy==6.3.1 wcwidth==0.9.4 docstring_parser==0.18.0 \
  pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 datasets==5.2.0 dill==0.4.1 \
  multiprocess==0.70.19 trl==1.16.0 qwix==0.1.8
cat <<END
On the GPU machine, in the checkout, with $FOLDER:

    python3 -m pip install --quiet --no-index --no-deps --target /tmp/site $FOLDER/*.whl
    PYTHONPATH=/tmp/site python3 benchmarks/gpu --call A --programs /tmp/programs     # then B, C and D
END
