"""Triton's interpreter runs the kernels here, without a GPU; it shows nothing about concurrency."""

import os

os.environ["TRITON_INTERPRET"] = "1"
